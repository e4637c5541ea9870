from dataclasses import replace

import pytest
import torch

from benchmarks.cases import CASES, Case
from benchmarks.memory import measure_task
from cqs.partial import Partial
from cqs.problem.dropout import Dropout
from cqs.scheduler import predict_cost
from cqs.tiler import Tiler
from cqs.worker import BACKENDS, HeldTokens, Worker
from cqs.worker.memory import measure_peak_bytes

pytestmark = pytest.mark.slow

BY_NAME = {case.name: case for case in CASES}
SOME_CASES = pytest.mark.parametrize(
    "case",
    [BY_NAME[name] for name in ("ragged", "ragged-causal", "gqa-causal", "cross-causal")],
    ids=lambda case: case.name,
)
SMALL_CASES = pytest.mark.parametrize(
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
SOME_NUM_TASKS = pytest.mark.parametrize("num_tasks", [1, 2, 7, 8, 40])


def make_for(backend, case, *dtype_and_device, **options):
    """The problem of a case; skips the test where the backend cannot take it."""
    problem = case.make(*dtype_and_device, **options)
    if reason := BACKENDS[backend].why_not(problem.query, problem.key, problem.value):
        pytest.skip(reason)
    return problem


def hold(tensor, ranges):
    return HeldTokens((each, tensor[:, :, each.start : each.stop].clone()) for each in ranges)


def hold_only_needed(problem, task):
    return (
        hold(problem.query, task.held_queries),
        hold(problem.key, task.held_keys),
        hold(problem.value, task.held_keys),
    )


def hold_everything(problem):
    return tuple(
        HeldTokens([(range(tensor.shape[2]), tensor)])
        for tensor in (problem.query, problem.key, problem.value)
    )


def exact_step(problem, step):
    """One step in float64, by a mask over all of its keys."""
    keys = [key for keys in step.blocks() for key in keys.keys]
    rows = torch.tensor(step.queries)
    first = step.causal_keys.start if step.causal_keys else 0
    visible = torch.ones(len(rows), len(keys), dtype=torch.bool)
    for column, key in enumerate(keys):
        if step.causal_keys and key in step.causal_keys:
            visible[: key - first, column] = False
    group_size = problem.query.shape[1] // problem.key.shape[1]
    key = problem.key[:, :, keys].double().repeat_interleave(group_size, 1)
    value = problem.value[:, :, keys].double().repeat_interleave(group_size, 1)
    scores = problem.scale * problem.query[:, :, rows].double() @ key.mT
    scores = scores.masked_fill(~visible, -torch.inf)
    return Partial(scores.softmax(-1) @ value, scores.logsumexp(-1))


@SOME_NUM_TASKS
@SOME_CASES
def test_every_step_is_attention_over_its_own_keys(case, num_tasks):
    problem = case.make(torch.float64)
    for task in problem.make_plan(num_tasks).tasks:
        partials = Worker.of(problem).run_steps(task.steps, *hold_everything(problem))
        for step, partial in zip(task.steps, partials, strict=True):
            expected = exact_step(problem, step)
            torch.testing.assert_close(partial.output, expected.output)
            torch.testing.assert_close(partial.lse, expected.lse)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@SOME_NUM_TASKS
@SOME_CASES
def test_a_task_needs_no_more_than_the_tokens_it_holds(case, num_tasks, backend):
    problem = case.make()
    worker = Worker.of(problem, backend)
    for task in problem.make_plan(num_tasks).tasks:
        alone = worker.run_steps(task.steps, *hold_only_needed(problem, task))
        among_all = worker.run_steps(task.steps, *hold_everything(problem))
        for one, other in zip(alone, among_all, strict=True):
            assert torch.equal(one.output, other.output) and torch.equal(one.lse, other.lse)


@EVERY_DEVICE
@pytest.mark.parametrize("num_tasks", [2, 8])
@SMALL_CASES
def test_tasks_computed_together_are_all_of_attention(assert_right, case, num_tasks, device):
    problem = make_for("triton", case, device=device)
    steps = [step for task in problem.make_plan(num_tasks).tasks for step in task.steps]
    assert_right(
        problem, Worker.of(problem, "triton").run_together(steps, *hold_everything(problem))
    )


@pytest.mark.sample(4)
@EVERY_DEVICE
@pytest.mark.parametrize("backend", ["triton", "cpu", "reference"])
@SMALL_CASES
def test_results_are_the_same_wherever_they_are_written(case, backend, device):
    """Rows first, as they leave for other workers, and into some heads of an answer."""
    problem = make_for(backend, case, device=device)
    worker, held = Worker.of(problem, backend), hold_everything(problem)
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
        for place, found in zip(places, zip(*expected, strict=True), strict=True):
            assert torch.equal(place, torch.cat(found, dim=2))
        together = worker.run_together(task.steps, *held)
        wide = [torch.cat([torch.full_like(part, torch.nan)] * 2, dim=1) for part in together]
        places = Partial(*(part[:, 1 : 1 + output.shape[1]] for part in wide))
        worker.run_together(task.steps, *held, into=places)
        assert all(map(torch.equal, places, together))
        assert all(part[:, 0].isnan().all() and part[:, -1].isnan().all() for part in wide)


@pytest.mark.sample(4)
@EVERY_DEVICE
@pytest.mark.parametrize("num_tasks", [2, 8])
@SMALL_CASES
def test_a_launch_per_task_is_all_of_attention(assert_right, case, num_tasks, device):
    """Partials of the Triton kernel, merged by a kernel too, as on a GPU."""
    problem = make_for("triton", case, device=device)
    worker, plan = Worker.of(problem, "triton"), problem.make_plan(num_tasks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cqs.partial.merges_at_once", lambda answer: True)
        patch.setattr("cqs.tiler.tiler.merges_at_once", lambda answer: True)
        tiler = Tiler(plan, *problem.empty_answer())
        for task in reversed(plan.tasks):
            tiler.add(task.index, worker.run_steps(task.steps, *hold_only_needed(problem, task)))
        assert_right(problem, tiler.finish())


@SOME_NUM_TASKS
@SOME_CASES
def test_predicted_bytes_are_those_that_are_sent(case, num_tasks):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        problem = case.make(dtype)
        for task in problem.make_plan(num_tasks).tasks:
            cost = predict_cost(task, problem.shape)
            held = hold_only_needed(problem, task)
            sent = sum(
                tokens.take([each]).nbytes
                for tokens, ranges in zip(
                    held, (task.held_queries, task.held_keys, task.held_keys), strict=True
                )
                for each in ranges
            )
            partials = Worker.of(problem).run_steps(task.steps, *held)
            returned = sum(tensor.nbytes for partial in partials for tensor in partial)
            assert (cost.bytes_in, cost.bytes_out) == (sent, returned)


@pytest.mark.parametrize("num_tasks", [1, 7, 8])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_predicted_peak_bounds_what_is_held_except_the_scratch_of_the_kernel(is_causal, num_tasks):
    problem = Case("peak", 4000, 4000, 8, 8, head_dim=64, is_causal=is_causal).make()
    task = problem.make_plan(num_tasks).tasks[-1]
    held = hold_only_needed(problem, task)
    _, measured = measure_peak_bytes(
        lambda: Worker.of(problem, "cpu").run_steps(task.steps, *held), torch.device("cpu")
    )
    cost = predict_cost(task, problem.shape)
    predicted = cost.peak_bytes - cost.bytes_in
    scratch = torch.get_num_threads() * 2**20
    assert measured - scratch <= predicted <= 1.5 * measured


@pytest.mark.parametrize(("num_tasks", "is_one_call"), [(1, True), (3, False)])
def test_gradients_of_one_call_are_what_the_backend_returns(num_tasks, is_one_call):
    problem = Case("square", 96, 96, 4, 2, 16).make(torch.bfloat16)
    steps = [step for task in problem.make_plan(num_tasks).tasks for step in task.steps]
    held = hold_everything(problem)
    output, lse = Worker.of(problem).run_together(steps, *held)
    of_queries = [HeldTokens.whole(each) for each in (torch.randn_like(output), output, lse)]

    def differentiate(**options):
        return Worker.of(problem).run_backward(steps, *held, *of_queries, **options)

    sums, rounded = differentiate(), differentiate(dtype=torch.bfloat16)
    assert all(gradient.dtype == torch.float32 for gradient in sums)
    assert all((gradient.dtype == torch.bfloat16) == is_one_call for gradient in rounded)
    assert all(map(torch.equal, sums, (each.float() for each in rounded)))
    rounding = sum((each.bfloat16().float() != each).sum() for each in sums)
    assert (rounding == 0) == is_one_call


def test_a_missing_token_is_named():
    problem = BY_NAME["full"].make()
    task = problem.make_plan(3).task(0)
    query, key, value = hold_only_needed(problem, task)
    for held in ((HeldTokens([]), key, value), (query, HeldTokens([]), value)):
        with pytest.raises(KeyError, match="tokens are held"):
            Worker(1.0).run_steps(task.steps, *held)


@pytest.mark.parametrize("dropout", [None, Dropout(0.1, 1)], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_predicted_peak_is_what_a_task_holds(backend, dtype, dropout):
    """Of the reference, and of the Triton kernel in its interpreter."""
    tokens = 256 if backend == "triton" else 1500
    case = Case("peak", tokens, tokens, 4, 2, 64)
    problem = replace(make_for(backend, case, dtype), dropout=dropout)
    predicted, held = measure_task(problem, problem.make_plan(3).task(0), backend)
    assert 0.95 * predicted <= held <= 1.05 * predicted


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cudnn", "flash", "reference"])
@pytest.mark.parametrize("num_tasks", [1, 7, 8])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_predicted_peak_is_what_a_gpu_holds(is_causal, num_tasks, backend):
    tokens = 8192 if backend == "reference" else 32768
    case = Case("peak", tokens, tokens, 8, 8, 128, is_causal=is_causal)
    problem = make_for(backend, case, torch.bfloat16, "cuda")
    for task in problem.make_plan(num_tasks).tasks:
        predicted, held = measure_task(problem, task, backend)
        assert 0.95 * predicted <= held <= 1.05 * predicted
