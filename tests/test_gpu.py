"""End to end on a CUDA device; the kernels alone are tested in ``worker``."""

import pytest
import torch
from support.exact import assert_tracks_exact, attend, eager_output, exact_answer

import cqs
from benchmarks.cases import CASES, Case
from benchmarks.errors import exact_rows
from cqs.worker import choose_backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_tasks", [1, 2, 7, 8, 13])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_exact(case, num_tasks, dtype):
    problem = case.make(dtype, "cuda")
    output, lse = attend(problem, num_tasks=num_tasks, verify=True)
    assert output.device == lse.device == problem.query.device
    exact = exact_answer(problem)
    assert_tracks_exact(output, eager_output(problem), exact.output)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_long_sequences_are_exact(backend, head_dim, is_causal):
    problem = Case("long", 20000, 20000, 16, 4, head_dim, is_causal=is_causal).make(
        torch.bfloat16, "cuda"
    )
    assert choose_backend(problem.query, problem.key, problem.value).name == "triton"
    rows = torch.linspace(0, 19999, 128, device="cuda").long()
    exact = exact_rows(problem, rows)
    eager = eager_output(problem)[:, :, rows]
    for num_tasks in (1, 7, 8, 31):
        output, _ = attend(problem, num_tasks=num_tasks, backend=backend)
        assert_tracks_exact(output[:, :, rows], eager, exact)


def test_programs_that_wait_for_each_other_compute_the_same():
    """Two calls at a time, neither of which has all multiprocessors: nobody waits for long."""
    problem = Case("long-tiles", 18000, 100_000, 8, 2, 128).make(torch.bfloat16, "cuda")
    tensors = problem.query, problem.key, problem.value
    expected = cqs.attention(*tensors, verify=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for stream in 3 * streams:
        with torch.cuda.stream(stream):
            found.append(cqs.attention(*tensors))
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in found)
