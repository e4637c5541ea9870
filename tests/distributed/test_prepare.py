"""Prepared calls compute what calls compute, and are compared between ranks like them."""

import pytest
import torch
from programs import (
    compare_prepared,
    complaint_about_prepared,
    complaint_of_prepare,
    python_calls_of_attention,
)

from benchmarks.cases import Case
from cqs.patterns import sliding_window

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case("causal", 60, 60, 4, 2, is_causal=True), {"return_lse": True}),
        (Case("cross", 40, 80, 4, 4), {"num_chunks": 2, "head_parallel": 1, "verify": True}),
        (Case("window", 60, 60, 4, 4, pattern=sliding_window(9, 4)), {"plan": "rows"}),
        (Case("dropout", 60, 60, 4, 4), {"dropout_p": 0.3, "backend": "reference"}),
    ],
    ids=lambda each: each.name if isinstance(each, Case) else "",
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_prepared_calls_are_bitwise_identical(ranks, num_ranks, case, options):
    """With and without gradients, for the lengths that were prepared and for others."""
    assert ranks.run(num_ranks, compare_prepared, case, options) == [[True] * 4] * num_ranks


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "value"),
    [
        ("num_heads", (1, 2, 8, 16), torch.float32, "4, got 2"),
        ("head_dim", (1, 4, 8, 8), torch.float32, "16, got 8"),
        ("batch", (2, 4, 8, 16), torch.float32, "1, got 2"),
        ("dtype", (1, 4, 8, 16), torch.float64, "torch.float32, got torch.float64"),
    ],
)
def test_tensors_that_were_not_prepared_are_named_on_every_rank(ranks, name, shape, dtype, value):
    for rank, (error, text) in enumerate(ranks.run(3, complaint_about_prepared, 1, shape, dtype)):
        assert error is ValueError and f"{name} must be as prepared, {value}" in text
        assert rank == 1 or text.startswith("rank 1 of the group failed")


def test_ranks_that_prepare_other_calls_find_out(ranks):
    for error, text in ranks.run(3, complaint_of_prepare, 2):
        assert error is ValueError
        assert text.startswith("rank 2 of the group has is_causal True, rank 0 has False")


@pytest.mark.parametrize(("has_gradients", "most"), [(False, 660), (True, 1300)])
def test_a_repeated_call_takes_few_python_calls(ranks, has_gradients, most):
    """Of each rank; what depends on the signature alone is not computed again."""
    assert max(ranks.run(3, python_calls_of_attention, has_gradients)) <= most
