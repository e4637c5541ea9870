"""Drivers of measurements: tasks in this process and on a Ray cluster."""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import cqs
from cqs.executors.ray import RunReport
from cqs.report.passes import MeasuredPass
from cqs.report.rows import RepeatTimes, ScalingRow, TaskBytes, make_row
from cqs.report.settings import Settings
from cqs.report.timing import make_timer, run_in_turn
from cqs.scheduler import Plan


class LocalDriver:
    """Times each task alone on the device of this process, without communication."""

    max_devices = sys.maxsize
    """Most devices that compute at the same time."""

    def __init__(self, settings: Settings):
        """Prepare the measurements.

        Args:
            settings: The problem and the options of its measurement.
        """
        self.settings = settings
        self._work_of = cache(partial(MeasuredPass, settings))
        self._ones: dict[str, tuple[int, list[float]]] = {}
        """Peak bytes, and seconds of every repeat, of one task, by pass: the same in all rows."""
        self._timer = make_timer()

    def measure(
        self, num_tasks: int, name: str, tick: Callable[[], object] = lambda: None
    ) -> ScalingRow:
        """Verify and measure a pass.

        Args:
            num_tasks: Number of tasks.
            name: ``"forward"`` or ``"backward"``.
            tick: Called after the verification and after every repeat.

        Raises:
            VerificationError: The merged result of all tasks is wrong.
        """
        work = self._work_of(name)
        plan = work.problem.make_plan(num_tasks)
        held = self._check(work, plan)
        tick()
        computations: dict[str, Callable[[], Any]] = {
            "dense": lambda: self._timer.time(work.dense)[0],
            "all": lambda: self._time_all(work, plan),
        }
        if num_tasks > 1 and name not in self._ones:
            computations["one"] = lambda: self._time_one(work)
        repeats = list(run_in_turn(computations, self.settings.repeats, tick))
        if num_tasks == 1:
            seconds = [turn["all"].get("whole", turn["all"]["tasks"][0]) for turn in repeats]
            self._ones[name] = held[0].peak, seconds
        elif name not in self._ones:
            peak = self._check(work, work.plan_of_one)[0].peak
            self._ones[name] = peak, [turn["one"] for turn in repeats]
        one_bytes, ones = self._ones[name]
        turns = [
            RepeatTimes(**turn["all"], one=one, dense=turn["dense"])
            for turn, one in zip(repeats, ones, strict=True)
        ]
        num_devices = min(self.max_devices, num_tasks)
        return make_row(
            self.settings,
            name,
            plan,
            turns=turns,
            held=held,
            one_bytes=one_bytes,
            num_devices=num_devices,
        )

    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        """Verify the merged result of all tasks, and measure the memory of each task."""
        results = [work.compute(task, work.hold(task)) for task in plan.tasks]
        work.verify(work.merge(results))
        del results
        return [work.weigh(task) for task in plan.tasks]

    def _time_all(self, work: MeasuredPass, plan: Plan) -> dict[str, Any]:
        """Return the fields of RepeatTimes except ``one`` and ``dense``."""
        timed = [
            self._timer.time(partial(work.compute, task, work.hold(task))) for task in plan.tasks
        ]
        seconds, results = zip(*timed, strict=True)
        merge = self._timer.time(partial(work.merge, results))[0] if plan.num_tasks > 1 else 0.0
        return {"tasks": seconds, "merge": merge}

    def _time_one(self, work: MeasuredPass) -> float:
        """Return the seconds of one worker."""
        return self._timer.time(work.one)[0]


class RayDriver(LocalDriver):
    """Times whole calls on a Ray cluster, from tensors on the driver to the result there.

    The time of one worker is that of a call with one task.
    """

    def __init__(self, settings: Settings, cluster: cqs.Cluster):
        """Prepare measurements on a cluster."""
        super().__init__(settings)
        self._make_executor, self.max_devices = cluster.make_executor, len(cluster.pids)

    def _run(self, work: MeasuredPass, plan: Plan) -> tuple[Any, RunReport]:
        executor = self._make_executor()
        return work.run(executor, plan), executor.reports[0]

    def _check(self, work: MeasuredPass, plan: Plan) -> list[TaskBytes]:
        """Verify the result of a plan, and return the predicted and measured bytes of its tasks."""
        result, report = self._run(work, plan)
        work.verify(result)
        return [
            TaskBytes(
                predicted=work.predict_bytes(plan.task(task.index), task.backend),
                peak=task.peak_bytes,
                received=task.bytes_in,
                returned=task.bytes_out,
            )
            for task in report.tasks
        ]

    def _time_all(self, work: MeasuredPass, plan: Plan) -> dict[str, Any]:
        report = self._run(work, plan)[1]
        return {
            "tasks": [task.seconds for task in report.tasks],
            "whole": report.seconds,
            "merge": report.slowest["merge"],
            "transfer": report.seconds - report.slowest["compute"],
        }

    def _time_one(self, work: MeasuredPass) -> float:
        return self._run(work, work.plan_of_one)[1].seconds
