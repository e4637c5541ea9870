"""Parts of the published suites that need no download; ``python -m tests.judged`` runs all."""

import warnings
from dataclasses import replace
from importlib import import_module

import pytest

from .framework import judge

SAMPLES = {"torch_opinfo": 30, "flex_masks": 20, "transformers_models": 20}
"""Module of a suite -> one in so many of its cases is run here."""


@pytest.mark.long
def test_onnx_cases_without_scores_as_an_output_pass():
    pytest.importorskip("onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of onnx
        suite = import_module(f"{__package__}.onnx_attention").suite()
    verdict = judge(suite)
    assert not verdict.failed and verdict.passed >= 78
    assert verdict.refused.keys() <= {"need_weights", "prob_mod"}


@pytest.mark.slow
@pytest.mark.sample(1000)  # the first alone
@pytest.mark.parametrize("name", SAMPLES)
def test_published_cases_do_not_fail(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other projects
        try:
            suite = import_module(f"{__package__}.{name}").suite()
            cases = list(suite.cases)[:: SAMPLES[name]]
        except ModuleNotFoundError as error:
            pytest.skip(f"requires {error.name}")
    verdict = judge(replace(suite, cases=cases))
    assert not verdict.failed and verdict.passed > len(cases) / 4
