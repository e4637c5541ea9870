"""Rows of reports: plan, predictions and measurements of one number of tasks and one pass."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cqs.report.measurement import Measurement, installed_versions, summarize
from cqs.report.settings import Settings
from cqs.scheduler import Plan, make_plan

PASSES = ("forward", "backward")
_BENCHMARK = "scaling"


class RepeatTimes(NamedTuple):
    """Times of one repeat, in seconds."""

    tasks: Sequence[float]
    """Computation of each task."""
    one: float
    """The whole problem as one task."""
    dense: float
    """One PyTorch call over all pairs, including masked ones."""
    merge: float
    """Merge of the tasks' results."""
    whole: float | None = None
    """The whole problem by all workers; ``None`` if each task was timed alone. Then it is the time
    of the slowest task plus 1/W of the merge, which W devices would share."""
    transfer: float | None = None
    """Time in which the slowest device does not compute; ``None`` without communication."""


class TaskBytes(NamedTuple):
    """Memory and traffic of one task, in bytes."""

    predicted: int | None
    """Predicted peak memory; ``None`` without a prediction."""
    peak: int
    """Measured peak memory, including the inputs."""
    received: int
    """Bytes of the inputs."""
    returned: int
    """Bytes of the results."""


@dataclass(frozen=True, kw_only=True)
class ScalingRow(Measurement, Settings):
    """A row for one number of tasks and one pass, with medians over the repeats."""

    tile: int
    """Number of tokens at whose multiples the plan's groups end."""
    held_tokens: int
    """Longest subsequence: queries or keys, whichever are more, that the largest task reads."""
    versions: dict[str, str] = field(default_factory=installed_versions)
    num_devices: int
    """Number of devices that compute at the same time; the efficiency refers to it."""
    responsibility_ratio: float
    """Live pairs of the whole problem divided by those of the busiest task."""
    balance: float
    """Live pairs of the busiest task divided by the mean."""
    predicted_bytes: int | None
    """Largest predicted peak memory of a task in bytes; ``None`` for backward passes."""
    peak_bytes: int
    """Largest measured peak memory of a task in bytes, including its inputs."""
    one_bytes: int | None = None
    """Measured peak memory of the whole problem as one task in bytes; ``None`` in older rows."""
    peak_ratio: float | None
    """Measured peak divided by predicted peak, for the task with the largest deviation from 1."""
    bytes_in: int
    """Largest number of bytes that a task receives."""
    bytes_out: int
    """Largest number of bytes that a task returns."""
    slowest_ms: float
    """Time of the slowest task in milliseconds."""
    mean_ms: float
    """Mean time of a task in milliseconds."""
    merge_ms: float
    """Time of the merge in milliseconds."""
    transfer_ms: float | None
    """Time in which the slowest device does not compute, in milliseconds, or ``None``."""
    one_ms: float
    """Time of the whole problem as one task, in milliseconds."""
    dense_ms: float
    """Time of one PyTorch call over all pairs, in milliseconds."""
    speedup: float
    """Median time of one task divided by that of all workers; 1 for one task."""

    @property
    def passes(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return self.benchmark.removeprefix(f"{_BENCHMARK} ")

    @property
    def time_balance(self) -> float:
        """Time of the slowest task divided by the mean."""
        return self.slowest_ms / self.mean_ms

    @property
    def memory_share(self) -> float | None:
        """Peak memory of a task divided by that of the whole problem as one task."""
        return None if self.one_bytes is None else self.peak_bytes / self.one_bytes

    @property
    def merge_share(self) -> float:
        """Time of the merge divided by that of all tasks; local devices share the merge."""
        num_shares = self.num_tasks if self.executor == "local" else 1
        return self.merge_ms / num_shares / self.median_ms

    @property
    def efficiency(self) -> float:
        """Speed-up over one task divided by the number of devices."""
        return self.speedup / self.num_devices

    def make_plan(self) -> Plan:
        """Return the plan that was measured."""
        return make_plan(
            self.tokens,
            num_tasks=self.num_tasks,
            is_causal=self.is_causal,
            pattern=self.make_pattern(),
            tile=self.tile,
        )


def make_row(
    settings: Settings,
    passes: str,
    plan: Plan,
    *,
    turns: Sequence[RepeatTimes],
    held: Sequence[TaskBytes],
    one_bytes: int,
    num_devices: int,
) -> ScalingRow:
    """Summarise the measurements of one number of tasks.

    Args:
        settings: Settings of the measurement.
        passes: ``"forward"`` or ``"backward"``.
        plan: Plan of the tasks.
        turns: Times of every repeat.
        held: Memory and traffic of every task, in the order of the times; tasks without work may
            be omitted.
        one_bytes: Peak memory of the whole problem as one task.
        num_devices: Number of devices that computed at the same time.
    """
    predicted = [(usage.predicted, usage.peak) for usage in held if usage.predicted]
    ratios = [peak / expected for expected, peak in predicted]
    busiest = max(task.live_pairs for task in plan.tasks)
    tasks = np.median([turn.tasks for turn in turns], axis=0)
    slowest = int(tasks.argmax())
    wholes = [
        turn.tasks[slowest] + turn.merge / plan.num_tasks if turn.whole is None else turn.whole
        for turn in turns
    ]

    def milliseconds(name: str) -> Any:
        times = [getattr(turn, name) for turn in turns]
        return None if None in times else 1e3 * float(np.median(times))

    return ScalingRow(
        benchmark=f"{_BENCHMARK} {passes}",
        baseline="one dense call",
        ratio=float(np.median(np.divide(wholes, [turn.dense for turn in turns]))),
        num_devices=num_devices,
        held_tokens=max(task.held_tokens for task in plan.tasks),
        responsibility_ratio=plan.responsibility_ratio,
        balance=busiest * plan.num_tasks / plan.live_pairs,
        predicted_bytes=max((expected for expected, _ in predicted), default=None),
        peak_bytes=max(usage.peak for usage in held),
        one_bytes=one_bytes,
        peak_ratio=max(ratios, key=lambda ratio: abs(ratio - 1), default=None),
        bytes_in=max(usage.received for usage in held),
        bytes_out=max(usage.returned for usage in held),
        slowest_ms=1e3 * float(tasks[slowest]),
        mean_ms=1e3 * float(tasks.mean()),
        speedup=float(np.median([turn.one for turn in turns]) / np.median(wholes)),
        **{f"{name}_ms": milliseconds(name) for name in ("merge", "transfer", "one", "dense")},
        **fields_of(settings, plan),
        **summarize(wholes),  # type: ignore[arg-type]
    )


def fields_of(settings: Settings, plan: Plan) -> dict[str, Any]:
    """Return the fields of a row that follow from settings and plan, by name."""
    kind = "causal" if settings.is_causal else "full"
    shape = f"h{settings.num_heads}-kv{settings.num_kv_heads}-d{settings.head_dim}"
    pattern = "" if settings.pattern is None else f" {settings.pattern}"
    return {
        **asdict(settings),
        "case": f"{kind}-{settings.tokens}-{shape}{pattern}",
        "num_tasks": plan.num_tasks,
        "tile": plan.tile,
    }
