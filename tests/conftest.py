"""Seeds, the skip of GPU tests without a GPU, and the one check of an answer."""

import pytest
import torch

from cqs.partial import Partial, lse_dtype
from cqs.problem import Problem
from cqs.testing import assert_tracks_exact, eager_output, exact_answer, visible_mask


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def eager_lse(problem: Problem) -> torch.Tensor:
    """The lse of plain PyTorch: scores in the accumulation dtype, then logsumexp."""
    dtype = lse_dtype(problem.query.dtype)
    group_size = problem.query.shape[1] // problem.key.shape[1]
    key = problem.key.to(dtype).repeat_interleave(group_size, 1)
    scores = problem.scale * problem.query.to(dtype) @ key.mT
    if (mask := visible_mask(problem)) is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.logsumexp(dim=-1)


@pytest.fixture(scope="session")
def assert_right():
    """Check an output and an lse against float64; rows that see no key must give 0 and -inf."""

    def check(problem: Problem, answer: tuple[torch.Tensor, torch.Tensor]) -> None:
        output, lse = answer
        exact = exact_answer(problem)
        assert output.dtype == problem.query.dtype
        assert lse.dtype == lse_dtype(problem.query.dtype)
        assert_tracks_exact(output, eager_output(problem), exact.output)
        blind = exact.lse == -torch.inf
        assert (output[blind] == 0).all()
        assert (lse[blind] == -torch.inf).all()
        actual, eager, truth = (
            Partial(output, each.masked_fill(blind, 0)).lse
            for each in (lse, eager_lse(problem), exact.lse)
        )
        assert_tracks_exact(actual, eager, truth, slack=4.0, name="lse")

    return check
