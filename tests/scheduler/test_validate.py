from dataclasses import replace

import pytest

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
CAUSAL = {name: plan for name, plan in PLANS.items() if plan.is_causal}


def every(plans):
    return pytest.mark.parametrize("plan", plans.values(), ids=plans)


def validate(plan, tasks):
    check(tasks, plan.seqlen_q, plan.seqlen_kv, plan.is_causal)


def check(tasks, seqlen_q, seqlen_kv, is_causal):
    validate_tasks(tasks, TokenGroups(seqlen_q, seqlen_kv, 1, is_causal, tile=1))


def with_step(plan, worker, index, *steps):
    """The tasks of ``plan``, one step of one worker replaced by others."""
    tasks = list(plan.tasks)
    old = tasks[worker].steps
    new = (*old[:index], *map(counted, steps), *old[index + 1 :])
    tasks[worker] = replace(tasks[worker], steps=new)
    return tasks


def dense_step(*fields):
    """A step of a plan without a pattern; ``live_pairs`` follow from the other fields."""
    return counted(Step(*fields, live_pairs=0))


def counted(step):
    return step._replace(live_pairs=sum(block.num_pairs for block in step.blocks()))


def one_task(*steps):
    return Task(0, (), (), (), steps)


def all_steps(plan):
    return [(task.index, i, step) for task in plan.tasks for i, step in enumerate(task.steps)]


def moved(tokens):
    """``tokens`` with one end or both moved by one."""
    start, stop = tokens.start, tokens.stop
    for first, last in ((-1, 0), (1, 0), (0, -1), (0, 1), (1, 1), (-1, -1)):
        yield range(start + first, stop + last)


def refuse(plan, tasks):
    with pytest.raises(ValueError, match=r"owned|live|square|causal block|beyond"):
        validate(plan, tasks)


@every(PLANS)
def test_tasks_are_accepted_in_any_order(plan):
    validate(plan, plan.tasks)
    validate(plan, reversed(plan.tasks))


@every(PLANS)
def test_a_step_cut_in_two_by_rows_is_accepted(plan):
    worker, index, step = all_steps(plan)[0]
    half = len(step.queries) // 2
    squares = step.causal_keys or range(0)
    upper = step._replace(queries=step.queries[:half], causal_keys=squares[:half] or None)
    lower = step._replace(queries=step.queries[half:], causal_keys=squares[half:] or None)
    if squares:
        lower = lower._replace(keys=(*step.keys, squares[:half]))
    validate(plan, with_step(plan, worker, index, upper, lower))


@every(PLANS)
def test_a_wrong_number_of_live_pairs_is_refused(plan):
    *others, last = plan.tasks
    step = last.steps[-1]
    wrong = replace(last, steps=(*last.steps[:-1], step._replace(live_pairs=1)))
    with pytest.raises(ValueError, match=f"holds {step.live_pairs} live pairs"):
        validate(plan, [*others, wrong])


@every(PLANS)
def test_a_missing_task_is_refused(plan):
    for worker in range(plan.num_tasks):
        refuse(plan, plan.tasks[:worker] + plan.tasks[worker + 1 :])


@every(PLANS)
def test_a_task_done_twice_is_refused(plan):
    for task in plan.tasks:
        refuse(plan, (*plan.tasks, task))


@every(PLANS)
def test_a_dropped_block_is_refused(plan):
    for worker, index, step in all_steps(plan):
        refuse(plan, with_step(plan, worker, index))
        for keys in step.keys:
            fewer = tuple(other for other in step.keys if other != keys)
            refuse(plan, with_step(plan, worker, index, step._replace(keys=fewer)))
        if step.causal_keys:
            refuse(plan, with_step(plan, worker, index, step._replace(causal_keys=None)))


@every(PLANS)
def test_a_duplicated_block_is_refused(plan):
    for worker, index, step in all_steps(plan):
        for keys in step.keys:
            again = dense_step(step.query_group, step.queries, (keys,), None)
            refuse(plan, with_step(plan, worker, index, step, again))
        if step.causal_keys:
            again = step._replace(keys=())
            refuse(plan, with_step(plan, worker, index, step, again))


@every(PLANS)
def test_a_block_moved_by_one_token_is_refused(plan):
    for worker, index, step in all_steps(plan):
        for queries in moved(step.queries):
            refuse(plan, with_step(plan, worker, index, step._replace(queries=queries)))
        for i, keys in enumerate(step.keys):
            for other in moved(keys):
                changed = (*step.keys[:i], other, *step.keys[i + 1 :])
                refuse(plan, with_step(plan, worker, index, step._replace(keys=changed)))


@every(CAUSAL)
def test_a_causal_square_moved_by_one_token_is_refused(plan):
    for worker, index, step in all_steps(plan):
        if step.causal_keys:
            for other in moved(step.causal_keys):
                broken = step._replace(causal_keys=other)
                refuse(plan, with_step(plan, worker, index, broken))


@every(CAUSAL)
def test_a_masked_block_is_refused(plan):
    """A block behind the diagonal is masked out for all of its queries."""
    for worker, index, step in all_steps(plan):
        first_masked = step.queries.stop + plan.seqlen_kv - plan.seqlen_q
        for stop in {first_masked + 1, plan.seqlen_kv}:
            if stop > first_masked:
                masked = dense_step(
                    step.query_group, step.queries, (range(first_masked, stop),), None
                )
                refuse(plan, with_step(plan, worker, index, step, masked))


@every(CAUSAL)
def test_a_causal_square_computed_in_full_is_refused(plan):
    for worker, index, step in all_steps(plan):
        if step.causal_keys:
            full = step._replace(keys=(*step.keys, step.causal_keys), causal_keys=None)
            refuse(plan, with_step(plan, worker, index, full))


def test_a_full_block_computed_as_a_causal_square_is_refused():
    first, second = range(0, 4), range(4, 8)
    with pytest.raises(ValueError, match=r"keys=range\(0, 4\), .* is a block off the diagonal"):
        check([one_task(dense_step(0, first, (), first))], 4, 4, False)
    below = [
        dense_step(0, first, (), first),
        dense_step(1, second, (), first),
        dense_step(1, second, (), second),
    ]
    with pytest.raises(ValueError, match=r"keys=range\(0, 4\), .* is a block off the diagonal"):
        check([one_task(*below)], 8, 8, True)
    sound = [dense_step(0, first, (), first), dense_step(1, second, (first,), second)]
    check([one_task(*sound)], 8, 8, True)


def test_a_causal_block_that_is_no_square_is_refused():
    """Also where the edges of other blocks cut it into pieces that would fit."""
    upper = dense_step(0, range(0, 4), (), range(0, 4))
    cuts = [dense_step(1, rows, (range(0, 4),), None) for rows in (range(4, 6), range(6, 8))]
    for stop in (7, 9):
        lower = dense_step(1, range(4, 8), (), range(4, stop))
        with pytest.raises(ValueError, match="is no square"):
            check([one_task(upper, *cuts, lower)], 8, 8, True)
    lower = dense_step(1, range(4, 8), (), range(4, 8))
    check([one_task(upper, *cuts, lower)], 8, 8, True)


def test_queries_that_see_no_key_must_not_be_computed():
    plan = PLANS["more-queries-causal"]
    masked_rows = dense_step(0, range(0, 3), (range(0, 1),), None)
    refuse(plan, with_step(plan, 0, 0, plan.task(0).steps[0], masked_rows))


def test_a_block_that_computes_nothing_is_refused():
    plan = PLANS["full"]
    step = plan.task(0).steps[0]
    for empty in (step._replace(queries=range(0)), step._replace(keys=(range(5, 5),))):
        with pytest.raises(ValueError, match="holds no live pair"):
            validate(plan, with_step(plan, 0, 0, step, empty))


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
        check([one_task(dense_step(0, queries, keys, None))], 4, 4, False)


def test_shares_of_two_tasks_exchanged_by_halves_are_rejected():
    """With an even number of workers two of them compute one half each; not both the same."""
    plan = make_plan(64, num_tasks=4, is_causal=True)
    (p, q), twin = (0, 2), 0
    halves = [s for s in plan.task(twin).steps if s.query_group == q]
    assert len(halves) == 1 and halves[0].queries == range(40, 48), (p, q)
    index = plan.task(twin).steps.index(halves[0])
    wrong = halves[0]._replace(queries=range(32, 40))
    refuse(plan, with_step(plan, twin, index, wrong))
