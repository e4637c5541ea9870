"""The table of features by backend says what happens."""

import random

import pytest
import torch
from score_cases import Drawn, assert_equal, compute_by, expected, relative, scaled
from support.pages import ROOT

import cqs
from benchmarks.cases import Case
from cqs.patterns import sliding_window
from cqs.worker import BACKENDS
from cqs.worker.features import FEATURES, feature_table

BEGIN, END = "<!-- table of cqs.worker.features -->\n", "<!-- end of table -->"
CASE = Case("features", 70, 90, num_heads=4, num_kv_heads=2)
TERMS = {
    "`Scores(sinks=)`": "sinks",
    "`Scores(softcap=)`": "softcap",
    "`Scores(alibi_slopes=)`": "alibi_slopes",
    "`Scores(bias=)`": "bias",
    "gradient of a bias": "bias",
    "`Scores(score_mod=)`": "score_mod",
    "gradients of what a score function reads": "score_mod",
}


def as_markdown():
    header, *rows = feature_table()
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "scores.md").read_text()
    assert page.split(BEGIN)[1].split(END)[0] == as_markdown()


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_backend_supports_what_the_table_says(backend, feature):
    problem = CASE.make(torch.float32)
    drawn = Drawn(problem, random.Random(1), [TERMS.get(feature)])
    drawn.has_bias_gradient = feature.startswith("gradient")
    if drawn.score_mod is not None:
        drawn.score_mod = relative if feature.startswith("gradients") else scaled
    options = {
        "sparse patterns": {"pattern": sliding_window(20, 5)},
        "dropout": {"dropout_p": 0.2, "seed": 1},
    }.get(feature, {})

    def compute():
        return compute_by(cqs.attention, problem, drawn, backend=backend, num_tasks=3, **options)

    if not FEATURES[feature](BACKENDS[backend]):
        if feature != "a task in one launch":
            with pytest.raises(NotImplementedError, match=f"backend '{backend}' does not support"):
                compute()
        return
    found = compute()
    if not options:
        assert_equal(found, expected(problem, drawn), 1e-4)
