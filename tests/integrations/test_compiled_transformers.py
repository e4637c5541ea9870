"""Models of transformers with attention by cqs are one graph of ``torch.compile``."""

import pytest
import torch
from tiny_models import BATCHES, assert_alike, make_model, passes, token_ids, with_attention
from transformers import AttentionInterface, StaticCache, masking_utils

from cqs.executors.operators import handle_of, read_pattern
from cqs.integrations.transformers import register
from cqs.patterns import causal, documents, sliding_window

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

register()


def make(family):
    return with_attention(make_model(family, num_hidden_layers=1), "cqs")


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("Mistral", "packed"),
        ("Llama", "own mask"),
        pytest.param("Llama", "whole", marks=pytest.mark.long),
        pytest.param("Qwen2", "padded on the left", marks=pytest.mark.long),
    ],
)
def test_outputs_and_gradients_are_those_of_eager(family, kind):
    own_mask = {"attention_mask": torch.rand(3, 1, 33, 33) < 0.8, "use_cache": False}
    batch = {"input_ids": token_ids()} | own_mask if kind == "own mask" else BATCHES[kind]()
    model = make(family)
    expected = passes(model, **batch)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_alike(passes(model, **batch), expected, 1e-12)


@pytest.mark.parametrize("family", ["Bert", pytest.param("Llama", marks=pytest.mark.long)])
def test_padding_does_not_recompile(family):
    kinds = {"padded on the left": "default", "padded on the right": "fail_on_recompile"}
    model = make(family)
    expected = [passes(model, **BATCHES[kind]()) for kind in kinds]
    model.compile(backend="aot_eager", fullgraph=True)
    for want, (kind, stance) in zip(expected, kinds.items(), strict=True):
        with torch.compiler.set_stance(stance):
            assert_alike(passes(model, **BATCHES[kind]()), want, 1e-12)


def test_lengths_are_dynamic():
    """Compiled once for one length and once for any."""
    model = make("Mistral")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    stances = {20: "default", 21: "default", 33: "fail_on_recompile"}
    for tokens, stance in stances.items():
        batch = {"input_ids": token_ids(2, tokens), "use_cache": False}
        with torch.compiler.set_stance(stance), torch.no_grad():
            assert torch.equal(compiled(**batch).logits, model(**batch).logits)


def test_decoding_with_a_static_cache():
    model, tokens, prompt = make("Mistral"), token_ids(2, 20), 12

    @torch.no_grad()
    def decode(step):
        cache, logits = StaticCache(config=model.config, max_cache_len=32), []
        for stop in range(prompt, 20):
            first = 0 if stop == prompt else stop - 1
            batch = {"input_ids": tokens[:, first:stop], "past_key_values": cache}
            call = model if stop == prompt else step
            batch["position_ids"] = torch.arange(first, stop)[None]
            with torch.compiler.set_stance("default" if stop < prompt + 3 else "fail_on_recompile"):
                logits.append(call(**batch).logits)
        return torch.cat(logits, dim=1)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(decode(compiled), decode(model))


CONFIG = make("Mistral").config


def make_mask(tokens, **options):
    options = {"past_key_values": None, "config": CONFIG, "attention_mask": None} | options
    embeddings = torch.empty(1, tokens, 0)
    return masking_utils.create_sliding_window_causal_mask(inputs_embeds=embeddings, **options)


def test_a_mask_that_nothing_reads_takes_no_memory():
    """The mask of a million tokens is 1 TB."""

    def find(positions):
        return handle_of(make_mask(10**6, position_ids=positions).cqs.pattern)

    positions = torch.arange(10**6)[None] % 250_000
    handle = torch.compile(find, backend="aot_eager", fullgraph=True)(positions)
    ends = [0, 250_000, 500_000, 750_000, 10**6]
    window = sliding_window(6, None) & causal()
    assert read_pattern(handle).bind(10**6) == (window & documents(ends, is_causal=False)).bind(
        10**6
    )


def attend(mask, query):
    return AttentionInterface()["cqs"](torch.nn.Module(), query, query, query, mask)[0]


def test_a_mask_of_an_unknown_function_is_read():
    def odd(query):
        mask = make_mask(20, and_mask_function=lambda b, h, q, k: (q - k) % 2 == 0)
        return attend(mask, query)

    query = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    found = torch.compile(odd, backend="aot_eager", fullgraph=True)(query)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    mask = (distance >= 0) & (distance < 7) & (distance % 2 == 0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=0, atol=1e-12)


def test_a_mask_that_is_changed_is_read():
    query = torch.randn(1, 2, 20, 8)

    def attend_changed(query):
        mask = make_mask(20)
        mask.logical_and_(torch.arange(20) != 3)
        return attend(mask, query), attend(mask & False, query)

    # PyTorch's other backends fail to change an expanded boolean tensor in place.
    compiled = torch.compile(attend_changed, backend="eager", fullgraph=True)
    for found, expected in zip(compiled(query), attend_changed(query), strict=True):
        assert torch.equal(found, expected)
