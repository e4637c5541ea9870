"""All tasks in this process, each timed as if it were alone on its device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

from cqs.report.passes import Pass, bytes_of, make_pass
from cqs.report.rows import Held, ScalingRow, Turn, make_row, median_seconds
from cqs.report.settings import Settings
from cqs.report.stopwatch import Stopwatch
from cqs.scheduler import Plan

Tick = Callable[[], object]
"""Called after the check and after every repeat."""
Measure = Callable[[int, str, Tick], ScalingRow]
"""Measures a number of workers and a pass."""


@contextmanager
def opened(settings: Settings) -> Iterator[Measure]:
    """Prepare to measure what the settings describe.

    The time of all workers is that of the slowest task, and a W-th of the merge, which on W devices
    is shared out; nothing travels.
    """
    work_of, watch = cache(partial(make_pass, settings)), Stopwatch()

    def measure(num_workers: int, name: str, tick: Tick) -> ScalingRow:
        work = work_of(name)
        plan = work.problem.make_plan(num_workers)
        held = _check_and_weigh(work, plan)
        tick()
        turns = []
        for _ in range(settings.repeats):
            turns.append(_time(work, plan, watch))
            tick()
        medians = median_seconds([turn.tasks for turn in turns])
        slowest = medians.index(max(medians))
        for i, turn in enumerate(turns):
            assert turn.merge is not None
            turns[i] = turn._replace(whole=turn.tasks[slowest] + turn.merge / num_workers)
        return make_row(settings, name, plan, turns=turns, held=held, num_devices=num_workers)

    yield measure


def _check_and_weigh(work: Pass, plan: Plan) -> list[Held]:
    """Check the result of all tasks, then measure what each holds."""
    results = [work.compute(task, work.hold(task)) for task in plan.tasks]
    work.verify(work.merger(plan, results)())
    returned = list(map(bytes_of, results))
    del results
    return [work.weigh(task, number) for task, number in zip(plan.tasks, returned, strict=True)]


def _time(work: Pass, plan: Plan, watch: Stopwatch) -> Turn:
    """Time one worker, one dense call, every task and the merge."""
    one, dense = (watch.time(compute)[0] for compute in (work.one, work.dense))
    timed = [watch.time(partial(work.compute, task, work.hold(task))) for task in plan.tasks]
    seconds, results = zip(*timed, strict=True)
    merge, _ = watch.time(work.merger(plan, results))
    return Turn(list(seconds), one=one, dense=dense, merge=merge)
