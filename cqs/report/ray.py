"""Measurements on a Ray cluster: whole calls, from tensors on the driver to the result there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from statistics import median
from typing import Any

import cqs
from cqs.executors.ray import RunReport
from cqs.report.local import Measure, Tick
from cqs.report.passes import Backward, MeasuredPass, make_pass
from cqs.report.rows import RepeatTimes, ScalingRow, TaskBytes, make_row
from cqs.report.settings import Settings
from cqs.report.timing import Timer, make_timer, run_in_turn
from cqs.scheduler import Plan

PARTS = ("before_seconds", "slowest_seconds", "between_seconds", "after_seconds")
"""Attributes of :class:`cqs.executors.ray.RunReport` whose medians are reported."""


@contextmanager
def opened(
    settings: Settings, num_actors: int | None = None, address: str | None = None
) -> Iterator[Measure]:
    """Yield the measuring function of the settings; the first measurement starts the cluster.

    The time of one worker is that of a call with one task.

    Args:
        settings: The problem and the options of its measurement.
        num_actors: Number of actors; ``None`` means one per GPU or core, see :class:`cqs.Cluster`.
        address: Address of a running Ray cluster; ``None`` starts a private Ray.
    """
    with ExitStack() as stack:
        start = cache(lambda: stack.enter_context(cqs.Cluster(num_actors, address=address)))
        work_of, timer = cache(partial(make_pass, settings)), make_timer()

        def measure(num_tasks: int, name: str, tick: Tick) -> ScalingRow:
            return _measure(settings, start(), work_of(name), num_tasks, timer, tick)

        yield measure


def _measure(
    settings: Settings,
    cluster: cqs.Cluster,
    work: MeasuredPass,
    num_tasks: int,
    timer: Timer,
    tick: Tick,
) -> ScalingRow:
    """Verify one run, which also reports the memory of its tasks, then time further runs."""
    plan, plan_of_one = (work.problem.make_plan(number) for number in (num_tasks, 1))
    result, report = _run(cluster, work, plan)
    work.verify(result)
    held = [
        TaskBytes(
            predicted=work.predict_bytes(plan.task(task.index), task.backend),
            peak=task.peak_bytes,
            received=task.bytes_in,
            returned=task.bytes_out,
        )
        for task in report.tasks
    ]
    tick()
    contenders = {
        "all": lambda: _run(cluster, work, plan)[1],
        "one": lambda: _run(cluster, work, plan_of_one)[1],
        "dense": lambda: timer.time(work.dense)[0],
    }
    rounds = list(run_in_turn(contenders, settings.repeats, tick))
    turns = [
        RepeatTimes(
            [task.seconds for task in found["all"].tasks],
            one=found["one"].seconds,
            dense=found["dense"],
            whole=found["all"].seconds,
            merge=found["all"].merge_seconds,
            transfer=found["all"].seconds - found["all"].slowest_seconds,
        )
        for found in rounds
    ]
    num_actors = len(cluster.pids)
    parts = {part: [getattr(found["all"], part) for found in rounds] for part in PARTS}
    details = {"actors": num_actors, **{part: median(each) for part, each in parts.items()}}
    return make_row(
        settings,
        work.name,
        plan,
        turns=turns,
        held=held,
        num_devices=min(num_actors, num_tasks),
        details=details,
    )


def _run(cluster: cqs.Cluster, work: MeasuredPass, plan: Plan) -> tuple[Any, RunReport]:
    """Compute a pass on the cluster; return the result and the report of the run."""
    executor = cluster.make_executor()
    result: Any
    if isinstance(work, Backward):
        result = executor.run_backward(work.problem, plan, work.answer, work.grad_output)
    else:
        result = executor.run(work.problem, plan)
    return result, executor.reports[0]
