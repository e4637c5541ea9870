"""Measurements in this process: each task is timed alone on the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

from cqs.report.passes import MeasuredPass, bytes_of, make_pass
from cqs.report.rows import RepeatTimes, ScalingRow, TaskBytes, make_row, median_seconds
from cqs.report.settings import Settings
from cqs.report.timing import Timer, make_timer, run_in_turn
from cqs.scheduler import Plan

Tick = Callable[[], object]
"""Function that is called after the verification and after every repeat."""
Measure = Callable[[int, str, Tick], ScalingRow]
"""Function that measures a number of tasks and a pass, with ticks."""


@contextmanager
def opened(settings: Settings) -> Iterator[Measure]:
    """Yield the measuring function of the settings.

    The time of all workers is that of the slowest task plus 1/W of the merge, which W devices would
    share. There is no communication.
    """
    work_of, timer = cache(partial(make_pass, settings)), make_timer()

    def measure(num_tasks: int, name: str, tick: Tick) -> ScalingRow:
        work = work_of(name)
        plan = work.problem.make_plan(num_tasks)
        held = _check_and_weigh(work, plan)
        tick()
        contenders = {
            "tasks": lambda: _time_tasks(work, plan, timer),
            "one": lambda: timer.time(work.one)[0],
            "dense": lambda: timer.time(work.dense)[0],
        }
        rounds = list(run_in_turn(contenders, settings.repeats, tick))
        medians = median_seconds([found["tasks"][0] for found in rounds])
        slowest = medians.index(max(medians))
        turns = []
        for found in rounds:
            seconds, merge = found.pop("tasks")
            whole = seconds[slowest] + merge / num_tasks
            turns.append(RepeatTimes(seconds, whole=whole, merge=merge, **found))
        return make_row(settings, name, plan, turns=turns, held=held, num_devices=num_tasks)

    yield measure


def _check_and_weigh(work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
    """Verify the merged result of all tasks, then measure the memory of each task."""
    results = [work.compute(task, work.hold(task)) for task in plan.tasks]
    work.verify(work.merger(plan, results)())
    returned = list(map(bytes_of, results))
    del results
    return [work.weigh(task, number) for task, number in zip(plan.tasks, returned, strict=True)]


def _time_tasks(work: MeasuredPass, plan: Plan, timer: Timer) -> tuple[list[float], float]:
    """Return the seconds of every task, and of the merge of their results."""
    timed = [timer.time(partial(work.compute, task, work.hold(task))) for task in plan.tasks]
    seconds, results = zip(*timed, strict=True)
    merge, _ = timer.time(work.merger(plan, results))
    return list(seconds), merge
