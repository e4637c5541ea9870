"""Memory of tasks with patterns: as predicted, and never that of a whole score matrix."""

from dataclasses import replace

import pytest
import torch

from benchmarks.cases import Case
from benchmarks.memory import measure_task
from cqs.patterns import dilated, fixed, from_mask, longformer, sliding_window, strided
from cqs.problem import Problem
from cqs.problem.dropout import Dropout
from cqs.scheduler import predict_cost
from cqs.worker import BACKENDS

pytestmark = pytest.mark.slow

PATTERNS = {
    "causal-window": sliding_window(256, 0),
    "dilated": dilated(64, 0, 4),
    "longformer": longformer(128, 16),
}
KINDS = (
    ("cpu", torch.float32, 16384),
    ("reference", torch.float32, 4096),
    ("reference", torch.bfloat16, 4096),
)


def assert_as_predicted(problem: Problem, num_tasks: int, backend: str) -> int:
    """Measure the task that holds most tokens; return what it held beside its inputs."""
    task = max(problem.make_plan(num_tasks).tasks, key=lambda task: task.held_tokens)
    predicted, held = measure_task(problem, task, backend)
    assert 0.95 * predicted <= held <= 1.05 * predicted
    return held - predict_cost(task, problem.shape).bytes_in


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("num_tasks", [1, 4, 7])
def test_a_task_holds_what_was_predicted_and_no_score_matrix(num_tasks, name):
    """Kinds go round: each meets every pattern and every number of workers."""
    place = num_tasks // 3 + list(PATTERNS).index(name)
    backend, dtype, tokens = KINDS[place % len(KINDS)]
    problem = Case("memory", tokens, tokens, 2, 1, 64, pattern=PATTERNS[name]).make(dtype)
    assert assert_as_predicted(problem, num_tasks, backend) < tokens**2 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_reference_holds_what_was_predicted_where_it_drops(dtype):
    case = Case("memory", 2000, 2000, 4, 2, 64, batch=2, pattern=PATTERNS["longformer"])
    problem = replace(case.make(dtype), dropout=Dropout(0.1, 1))
    assert_as_predicted(problem, 4, "reference")


@pytest.mark.parametrize(
    "pattern",
    [
        sliding_window(40, 0),
        strided(8),
        strided(9),
        longformer(40, 3),
        from_mask(torch.rand(192, 192, generator=torch.Generator().manual_seed(1)) < 0.5),
    ],
    ids=["window", "strided", "strided-ragged", "longformer", "mask"],
)
def test_the_plain_kernel_holds_what_was_predicted(pattern):
    """In its interpreter."""
    problem = Case("memory", 192, 192, 8, 4, 64, pattern=pattern).make()
    if reason := BACKENDS["triton"].why_not(problem.query, problem.key, problem.value):
        pytest.skip(reason)
    assert_as_predicted(problem, 3, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pattern",
    [*PATTERNS.values(), strided(128), fixed(128, 16), strided(96)],
    ids=[*PATTERNS, "strided", "fixed", "strided-ragged"],
)
@pytest.mark.parametrize("num_tasks", [1, 4, 7])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("triton", torch.bfloat16), ("triton", torch.float32), ("reference", torch.bfloat16)],
    ids=["triton-bf16", "triton-f32", "reference-bf16"],
)
def test_a_gpu_holds_what_was_predicted_and_no_score_matrix(backend, dtype, num_tasks, pattern):
    tokens = 32768 if backend == "triton" else 8192
    problem = Case("memory", tokens, tokens, 2, 1, 128, pattern=pattern).make(dtype, "cuda")
    held = assert_as_predicted(problem, num_tasks, backend)
    assert backend == "reference" or held < tokens**2 / 2
