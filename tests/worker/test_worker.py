"""Where workers write results, and the memory that they hold."""

from dataclasses import replace

import pytest
import torch
from support.exact import tensors_of

from benchmarks.cases import Case
from benchmarks.memory import measure_task
from cqs.partial import Partial
from cqs.patterns import causal, dilated, fixed, from_mask, longformer, sliding_window, strided
from cqs.problem.dropout import Dropout
from cqs.scheduler import predict_cost
from cqs.worker import BACKENDS, HeldTokens, Worker

pytestmark = pytest.mark.slow

CASES = pytest.mark.parametrize(
    "case",
    [
        Case("ragged", 67, 67, 2, 2, batch=2),
        Case("ragged-causal", 67, 67, 2, 2, is_causal=True),
        Case("gqa-causal", 67, 67, 4, 2, is_causal=True),
        Case("cross-causal", 45, 150, 2, 2, is_causal=True),
    ],
    ids=lambda case: case.name,
)
EVERY_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


def make_for(backend, case, dtype=torch.float32, device="cpu"):
    """The problem of a case; skips the test where the backend cannot take it."""
    problem = case.make(dtype, device)
    if reason := BACKENDS[backend].why_not(*tensors_of(problem)):
        pytest.skip(reason)
    return problem


@pytest.mark.sample(9)
@EVERY_DEVICE
@pytest.mark.parametrize("backend", ["triton", "cpu", "reference"])
@CASES
def test_results_are_the_same_wherever_they_are_written(case, backend, device):
    """Rows first, as they leave for other workers, and into some heads of an answer."""
    problem = make_for(backend, case, device=device)
    worker, held = Worker.of(problem, backend), list(map(HeldTokens.whole, tensors_of(problem)))
    is_interpreted = (backend, device) == ("triton", "cpu")
    for task in problem.make_plan(8).tasks[is_interpreted :: 3 if is_interpreted else 1]:
        expected = worker.run_steps(task.steps, *held)
        rows = sum(len(step.queries) for step in task.steps)
        output, lse = expected[0]
        places = Partial(
            output.new_full((rows, *output.shape[:2], output.shape[3]), torch.nan).movedim(0, 2),
            lse.new_full((rows, *lse.shape[:2]), torch.nan).movedim(0, 2),
        )
        worker.run_steps(task.steps, *held, into=places)
        for place, parts in zip(places, zip(*expected, strict=True), strict=True):
            assert torch.equal(place, torch.cat(parts, dim=2))
        together = worker.run_together(task.steps, *held)
        wide = [torch.cat([torch.full_like(part, torch.nan)] * 2, dim=1) for part in together]
        places = Partial(*(part[:, 1 : 1 + output.shape[1]] for part in wide))
        worker.run_together(task.steps, *held, into=places)
        assert all(map(torch.equal, places, together))
        assert all(part[:, 0].isnan().all() and part[:, -1].isnan().all() for part in wide)


@pytest.mark.parametrize(("num_tasks", "is_one_call"), [(1, True), (3, False)])
def test_gradients_of_one_call_are_what_the_backend_returns(num_tasks, is_one_call):
    problem = Case("square", 96, 96, 4, 2, 16).make(torch.bfloat16)
    steps = [step for task in problem.make_plan(num_tasks).tasks for step in task.steps]
    held = list(map(HeldTokens.whole, tensors_of(problem)))
    output, lse = Worker.of(problem).run_together(steps, *held)
    output_tensors = map(HeldTokens.whole, (torch.randn_like(output), output, lse))
    held += output_tensors

    def differentiate(**options):
        return Worker.of(problem).run_backward(steps, *held, **options)

    sums, rounded = differentiate(), differentiate(dtype=torch.bfloat16)
    assert all(gradient.dtype == torch.float32 for gradient in sums)
    assert all((gradient.dtype == torch.bfloat16) == is_one_call for gradient in rounded)
    assert all(map(torch.equal, sums, (t.float() for t in rounded)))
    rounding = sum((t.bfloat16().float() != t).sum() for t in sums)
    assert (rounding == 0) == is_one_call


PATTERNS = {
    "causal-window": sliding_window(256, 0),
    "dilated": dilated(64, 0, 4),
    "longformer": longformer(128, 16),
}
RANDOM = from_mask(torch.rand(192, 192, generator=torch.Generator().manual_seed(1)) < 0.5)
KINDS = (
    ("cpu", torch.float32, 16384),
    ("reference", torch.float32, 4096),
    ("reference", torch.bfloat16, 4096),
)


def assert_as_predicted(problem, num_tasks, backend):
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("dropout", [None, Dropout(0.1, 1)], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("backend", "tokens", "pattern"),
    [("triton", 256, None), ("reference", 1500, None), ("reference", 2000, PATTERNS["longformer"])],
    ids=str,
)
def test_predicted_peak_is_what_a_task_holds(backend, tokens, pattern, dtype, dropout):
    """Of the reference, and of the Triton kernel in its interpreter."""
    case = Case("peak", tokens, tokens, 4, 2, 64, pattern=pattern)
    problem = replace(make_for(backend, case, dtype), dropout=dropout)
    assert_as_predicted(problem, 3, backend)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "pattern",
    [sliding_window(40, 0), strided(8), strided(9), longformer(40, 3), RANDOM],
    ids=["window", "strided", "strided-ragged", "longformer", "mask"],
)
def test_the_plain_kernel_holds_what_was_predicted(pattern):
    """In its interpreter."""
    problem = make_for("triton", Case("memory", 192, 192, 8, 4, 64, pattern=pattern))
    assert_as_predicted(problem, 3, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tasks", [1, 4, 7])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", torch.bfloat16),
        ("triton", torch.float32),
        ("reference", torch.bfloat16),
        ("cudnn", torch.bfloat16),
        ("flash", torch.bfloat16),
    ],
    ids=str,
)
def test_a_gpu_holds_what_was_predicted_and_no_score_matrix(backend, dtype, num_tasks):
    tokens, *heads = (8192, 8, 8) if backend == "reference" else (32768, 2, 1)
    patterns = [None, causal()]
    if backend not in ("cudnn", "flash"):
        patterns += [*PATTERNS.values(), strided(128), fixed(128, 16), strided(96)]
    for pattern in patterns:
        case = Case("memory", tokens, tokens, *heads, 128, pattern=pattern)
        problem = make_for(backend, case, dtype, "cuda")
        held = assert_as_predicted(problem, num_tasks, backend)
        assert backend == "reference" or held < tokens**2 / 2
