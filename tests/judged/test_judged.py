"""Parts of the published suites that need no download; ``python -m tests.judged`` runs all."""

import warnings
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from .framework import Case, Suite, assert_tracks, format_table, judge

SAMPLES = {"torch_opinfo": 9, "flex_masks": 20}
"""Module of a suite -> one in so many of its cases is run here."""


def raises(error):
    def check():
        raise error

    return check


def test_each_case_passes_is_refused_or_fails():
    cases = [
        Case("right", lambda: None),
        Case("bias", raises(TypeError("attention() does not support bias: call x"))),
        Case("wrong", raises(AssertionError("0.1 is not 0.2"))),
        Case("obscure", raises(TypeError("unhashable"))),
        Case("bad argument", raises(ValueError("mask must have 2 or 4 dimensions"))),
    ]
    found = judge(Suite("suite", "package 1", cases))
    assert (found.passed, found.refused) == (1, {"bias": 1})
    assert list(found.failed) == ["wrong", "obscure", "bad argument"] and found.num_cases == 5
    assert "suite" in format_table([found]) and "bias 1" in format_table([found])


def test_a_wrong_row_is_noticed_among_many():
    exact = torch.randn(1000, 64, generator=torch.manual_seed(0))
    eager = exact.bfloat16()
    assert_tracks([eager], [eager], [exact], (0, 0))
    found = eager.clone()
    found[7] = 0
    with pytest.raises(AssertionError, match="output"):
        assert_tracks([found], [eager], [exact], (0, 0))


@pytest.mark.slow
def test_onnx_cases_without_scores_as_an_output_pass():
    pytest.importorskip("onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of onnx
        suite = import_module(f"{__package__}.onnx_attention").suite()
    cases = [case for case in suite.cases if not case.name.startswith("test_flexattention")]
    scores = [case.name for case in cases if returns_scores(case)]
    found = judge(replace(suite, cases=cases))
    assert not found.failed
    assert found.refused == {"need_weights": len(scores)} and found.passed >= 78


def returns_scores(case):
    """Whether a case of ONNX has an output of scores before the softmax."""
    (node,) = case.check.args[0].model.graph.node
    modes = [each.i for each in node.attribute if each.name == "qk_matmul_output_mode"]
    return len(node.output) in (2, 4) and modes != [3]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_published_cases_do_not_fail(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other projects
        try:
            suite = import_module(f"{__package__}.{name}").suite()
            cases = list(suite.cases)[:: SAMPLES[name]]
        except ModuleNotFoundError as error:
            pytest.skip(f"requires {error.name}")
    found = judge(replace(suite, cases=cases))
    assert not found.failed and found.passed > len(cases) / 4
