import random
import weakref
from collections import Counter

import pytest
import torch

from benchmarks.cases import CASES
from cqs.partial import Partial
from cqs.tiler import Tiler
from cqs.worker import HeldTokens, Worker

BY_NAME = {case.name: case for case in CASES}


class Run:
    """A problem, its plan, the partials of all tasks and a tiler that waits for them."""

    def __init__(self, name, num_tasks, dtype=torch.float32):
        self.problem = BY_NAME[name].make(dtype)
        self.plan = self.problem.make_plan(num_tasks)
        tensors = self.problem.query, self.problem.key, self.problem.value
        held = list(map(HeldTokens.whole, tensors))
        index = Worker.of(self.problem, "reference")
        self.partials = [index.run_steps(task.steps, *held) for task in self.plan.tasks]
        self.reset()

    def reset(self):
        """Start anew with an answer full of NaN, which must all be overwritten."""
        self.answer = Partial(*(t.fill_(torch.nan) for t in self.problem.empty_answer()))
        self.tiler = Tiler(self.plan, *self.answer)

    def add(self, *indices):
        for index in indices:
            self.tiler.add(index, self.partials[index])


@pytest.mark.parametrize(
    ("name", "num_tasks"),
    [
        ("ragged", 1),
        ("ragged", 7),
        ("ragged-causal", 8),
        ("cross-causal", 13),
        ("more-queries-causal", 4),
        ("two-tokens", 13),
    ],
)
def test_the_answer_is_exact(assert_right, name, num_tasks):
    """Partials are only read."""
    run = Run(name, num_tasks)
    before = [[p.output.clone() for p in partials] for partials in run.partials]
    run.add(*range(num_tasks))
    finished = run.tiler.finish()
    assert finished.output is run.answer.output and finished.lse is run.answer.lse
    assert_right(run.problem, finished)
    for partials, copies in zip(run.partials, before, strict=True):
        assert all(map(torch.equal, [partial.output for partial in partials], copies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["ragged-causal", "cross-causal"])
def test_any_order_of_arrival_is_bitwise_identical(name, dtype):
    run = Run(name, 8, dtype)
    answers = []
    for shuffle in range(6):
        run.reset()
        run.add(*random.Random(shuffle).sample(range(8), 8))
        answers.append(run.tiler.finish())
    for answer in answers[1:]:
        assert all(map(torch.equal, answer, answers[0]))


@pytest.mark.parametrize(("name", "num_tasks"), [("ragged", 7), ("more-queries-causal", 8)])
def test_a_group_finishes_with_its_last_partial_and_not_before(name, num_tasks):
    run = Run(name, num_tasks)
    missing = Counter(step.query_group for task in run.plan.tasks for step in task.steps)
    final = {}
    for task in reversed(run.plan.tasks):
        groups = [step.query_group for step in task.steps]
        missing.subtract(groups)
        finished = run.tiler.add(task.index, run.partials[task.index])
        complete = {run.plan.token_groups[group] for group in groups if not missing[group]}
        assert set(finished) == complete and len(finished) == len(complete)
        for rows in finished:
            final[rows] = run.answer.output[:, :, rows.start : rows.stop].clone()
    output = run.tiler.finish().output
    for rows, early in final.items():
        assert torch.equal(early, output[:, :, rows.start : rows.stop])


def test_the_partials_of_a_finished_group_are_let_go():
    run = Run("ragged", 7)
    alive = [weakref.ref(partial.output) for partials in run.partials for partial in partials]
    for index in range(7):
        run.add(index)
        run.partials[index] = None
    assert not any(reference() is not None for reference in alive)


@pytest.mark.parametrize("order", [[], [6, 0, 1], [0, 1, 2, 3, 4, 5]], ids=str)
def test_finish_names_the_missing_tasks(order):
    run = Run("ragged", 7)
    run.add(*order)
    missing = [index for index in range(7) if index not in order]
    assert list(run.tiler.missing) == missing
    with pytest.raises(RuntimeError) as raised:
        run.tiler.finish()
    assert str(missing) in str(raised.value)


def test_a_task_that_was_added_before_is_refused():
    """And one that does not exist."""
    run = Run("ragged-causal", 7)
    run.add(3)
    with pytest.raises(ValueError, match="task 3 was added before"):
        run.add(3)
    for index in (-1, 7):
        with pytest.raises(ValueError, match=rf"range\(7\), got {index}"):
            run.tiler.add(index, run.partials[0])
    assert run.tiler.missing == (0, 1, 2, 4, 5, 6)


WRONG = {
    "too few": (lambda partials: partials[:-1], "has 4 steps, got 3 partials"),
    "other order": (lambda partials: partials[::-1], r"step \d: output must be"),
    "the last": (
        lambda partials: [*partials[:-1], partials[-1]._replace(lse=partials[-1].lse.double())],
        "step 3: lse must be .* got .* torch.float64",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=WRONG)
def test_wrong_partials_are_refused_and_nothing_is_taken(assert_right, spoil, message):
    run = Run("ragged", 8)
    assert len(run.partials[5]) == 4
    run.add(0, 1, 2, 3, 4, 6, 7)
    before = run.answer.output.clone()
    with pytest.raises(ValueError, match=message):
        run.tiler.add(5, spoil(run.partials[5]))
    assert run.tiler.missing == (5,)
    assert torch.equal(run.answer.output.nan_to_num(7), before.nan_to_num(7))
    run.add(5)
    assert_right(run.problem, run.tiler.finish())
