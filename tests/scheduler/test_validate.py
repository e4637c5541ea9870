"""The proof of a plan: faults of its tasks are refused, with and without a pattern."""

from dataclasses import replace

import pytest

from cqs.patterns import bigbird, block_diagonal, causal, dilated, fixed, sliding_window, strided
from cqs.scheduler import Step, Task, make_plan
from cqs.scheduler.token_groups import TokenGroups
from cqs.scheduler.validate import validate_tasks

PLANS = {
    "full": make_plan(60, num_tasks=7),
    "causal": make_plan(60, num_tasks=7, is_causal=True),
    "even-causal": make_plan(61, num_tasks=8, is_causal=True),
    "cross-causal": make_plan(40, 75, num_tasks=7, is_causal=True),
    "more-queries-causal": make_plan(75, 40, num_tasks=4, is_causal=True),
    "one-worker": make_plan(20, num_tasks=1, is_causal=True),
}
OF_PATTERNS = {
    "window": make_plan(60, num_tasks=7, pattern=sliding_window(9, 4)),
    "strided-even": make_plan(61, num_tasks=8, pattern=strided(5)),
    "more-keys": make_plan(40, 75, num_tasks=7, pattern=fixed(6, 2)),
    "more-queries": make_plan(75, 40, num_tasks=4, pattern=block_diagonal(9)),
    "tile": make_plan(5000, num_tasks=7, tile=128, pattern=bigbird()),
    "one-worker": make_plan(9, num_tasks=1, pattern=dilated(2, 2, 2)),
}


def every(plans):
    return pytest.mark.parametrize("plan", plans.values(), ids=plans)


def validate(plan, tasks):
    lengths = plan.seqlen_q, plan.seqlen_kv
    pattern = plan.pattern and plan.pattern.bind(*lengths)
    validate_tasks(tasks, TokenGroups(*lengths, 1, plan.is_causal, tile=1, pattern=pattern))


def refuse(plan, tasks, message=r"owned|live|square|causal block|beyond"):
    with pytest.raises(ValueError, match=message):
        validate(plan, tasks)


def counted(step):
    """A step of a plan without a pattern with the number of its live pairs."""
    return step._replace(live_pairs=sum(block.num_pairs for block in step.blocks()))


def check(steps, seqlen, is_causal):
    """Validate one task of these (query group, queries, keys, causal keys)."""
    task = Task(0, (), (), (), tuple(counted(Step(*fields, live_pairs=0)) for fields in steps))
    validate_tasks([task], TokenGroups(seqlen, seqlen, 1, is_causal, tile=1))


def with_step(plan, task, index, *steps):
    """The tasks of ``plan``, one step of one task replaced by others."""
    tasks = list(plan.tasks)
    tasks[task.index] = replace(task, steps=(*task.steps[:index], *steps, *task.steps[index + 1 :]))
    return tasks


def moved(tokens):
    """``tokens`` with one end or both moved by one."""
    for first, last in ((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1)):
        yield range(tokens.start + first, tokens.stop + last)


def faulty(step, plan):
    """Steps in place of one, which compute too little, too much or something else."""
    yield ()
    yield (step, step)
    yield from ((step._replace(queries=queries),) for queries in moved(step.queries))
    for i, keys in enumerate(step.keys):
        yield (step._replace(keys=(*step.keys[:i], *step.keys[i + 1 :])),)
        yield (step, step._replace(keys=(keys,), causal_keys=None))
        for other in moved(keys):
            yield (step._replace(keys=(*step.keys[:i], other, *step.keys[i + 1 :])),)
    if square := step.causal_keys:
        yield (step._replace(causal_keys=None),)
        yield (step, step._replace(keys=()))
        yield (step._replace(keys=(*step.keys, square), causal_keys=None),)
        yield from ((step._replace(causal_keys=keys),) for keys in moved(square))
    first_masked = step.queries.stop + plan.seqlen_kv - plan.seqlen_q
    for stop in {first_masked + 1, plan.seqlen_kv} if plan.is_causal else ():
        if stop > first_masked:  # behind the diagonal, for all of the queries
            yield (step, step._replace(keys=(range(first_masked, stop),), causal_keys=None))


@every(PLANS | OF_PATTERNS)
def test_tasks_are_accepted_in_any_order(plan):
    validate(plan, plan.tasks)
    validate(plan, reversed(plan.tasks))


@every(PLANS)
def test_a_faulty_step_is_refused(plan):
    for task in plan.tasks:
        for index, step in enumerate(task.steps):
            for steps in faulty(step, plan):
                refuse(plan, with_step(plan, task, index, *map(counted, steps)))
            wrong = step._replace(live_pairs=step.live_pairs - 1)
            refuse(plan, with_step(plan, task, index, wrong), f"holds {step.live_pairs} live pairs")


@every(PLANS | OF_PATTERNS)
def test_a_task_left_out_or_done_twice_is_refused(plan):
    for task in filter(lambda task: task.steps, plan.tasks):
        refuse(plan, plan.tasks[: task.index] + plan.tasks[task.index + 1 :], "owned never")
        refuse(plan, (*plan.tasks, task), r"keys \d+\.\.\d+ of queries .* are owned twice")


@pytest.mark.slow
@every(OF_PATTERNS)
def test_a_faulty_step_of_a_pattern_is_refused(plan):
    for task in plan.tasks:
        for index, step in enumerate(task.steps):
            shorter = range(step.queries.start + 1, step.queries.stop)
            for message, change in (
                ("holds no live pair|owned|holds", {"keys": step.keys[1:]}),
                ("owned|holds no live pair", {"queries": shorter}),
                (r"holds \d+ live pairs", {"live_pairs": step.live_pairs - 1}),
                ("reaches beyond the", {"keys": (range(plan.seqlen_kv + 1),)}),
                ("reach beyond the", {"queries": range(-1, 0)}),
                ("is a causal block", {"causal_keys": step.queries}),
            ):
                refuse(plan, with_step(plan, task, index, step._replace(**change)), message)


def test_a_block_without_a_live_pair_is_refused():
    for pattern, keys in (
        (block_diagonal(10), range(50, 60)),
        (causal(), range(50, 60)),
        (None, range(5, 5)),
    ):
        plan = make_plan(60, num_tasks=3, pattern=pattern)
        step = plan.tasks[0].steps[0]
        beyond = step._replace(keys=(*step.keys, keys))
        message = rf"keys=range\({keys.start}, {keys.stop}\), is_causal=False\) holds no live pair"
        refuse(plan, with_step(plan, plan.tasks[0], 0, beyond), message)


def test_a_full_block_computed_as_a_causal_square_is_refused():
    first, second = range(0, 4), range(4, 8)
    with pytest.raises(ValueError, match=r"keys=range\(0, 4\), .* is a block off the diagonal"):
        check([(0, first, (), first)], 4, False)
    below = [(0, first, (), first), (1, second, (), first), (1, second, (), second)]
    with pytest.raises(ValueError, match=r"keys=range\(0, 4\), .* is a block off the diagonal"):
        check(below, 8, True)
    check([(0, first, (), first), (1, second, (first,), second)], 8, True)


def test_a_causal_block_that_is_no_square_is_refused():
    """Also where the edges of other blocks cut it into pieces that would fit."""
    upper = (0, range(0, 4), (), range(0, 4))
    cuts = [(1, rows, (range(0, 4),), None) for rows in (range(4, 6), range(6, 8))]
    for stop in (7, 9):
        with pytest.raises(ValueError, match="is no square"):
            check([upper, *cuts, (1, range(4, 8), (), range(4, stop))], 8, True)
    check([upper, *cuts, (1, range(4, 8), (), range(4, 8))], 8, True)


@pytest.mark.parametrize(
    ("queries", "keys", "message"),
    [
        (range(0, 4), (range(0, 3),), r"keys 3\.\.4 of queries range\(0, 4\) are owned never"),
        (range(0, 3), (range(0, 4),), r"keys 0\.\.4 of queries range\(3, 4\) are owned never"),
        (range(0, 4), (range(0, 3), range(2, 4)), r"keys 2\.\.3 of .* are owned twice"),
        (range(0, 4), (range(0, 5),), r"keys=range\(0, 5\).* reaches beyond the 4 keys"),
        (range(0, 5), (range(0, 4),), "blocks reach beyond the 4 queries"),
        (range(-1, 4), (range(0, 4),), "blocks reach beyond the 4 queries"),
    ],
    ids=["keys-missing", "queries-missing", "overlap", "extra-key", "extra-query", "negative"],
)
def test_the_message_says_which_pairs_are_wrong(queries, keys, message):
    with pytest.raises(ValueError, match=message):
        check([(0, queries, keys, None)], 4, False)
