"""One row per worker count and pass: what was planned, predicted and measured."""

import platform
import statistics
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cqs.report import measurement
from cqs.report.measurement import Measurement, summarize
from cqs.report.settings import Settings
from cqs.scheduler import Plan, make_plan

PASSES = ("forward", "backward")
_BENCHMARK = "scaling"
_PACKAGES = ("numpy", "ray", "triton", "flash-attn-4")

RowKind = TypeVar("RowKind", bound="Row")


class Turn(NamedTuple):
    """Seconds of one repeat."""

    tasks: list[float]
    """Of each task: its computation alone."""
    one: float
    """Of everything by one worker."""
    dense: float
    """Of all pairs, masked out or not, by one call of PyTorch."""
    whole: float
    """Of everything by all workers."""
    merge: float | None = None
    """Of merging what the tasks return; ``None`` if it is not timed apart."""
    transfer: float | None = None
    """Of all that the slowest device does not compute; ``None`` if nothing travels."""


class Held(NamedTuple):
    """Bytes of one task."""

    predicted: int | None
    peak: int
    received: int
    returned: int


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, if they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Row(Measurement, ABC):
    """What was measured of one problem."""

    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool
    pattern: str | None
    seed: int
    tile: int
    """Of the plan: groups end at its multiples."""
    held_tokens: int
    """The longest subsequence: tokens that a task needs, the larger side, of the largest task."""
    versions: dict[str, str] = field(default_factory=installed_versions)

    @property
    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """What tells the rows of one report apart."""

    @cached_property
    def settings(self) -> Settings:
        """What the row was measured with."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)})


@dataclass(frozen=True, kw_only=True)
class ScalingRow(Row):
    """One worker count and pass; times are medians of the repeats, ratios those of the repeats."""

    num_devices: int
    """How many compute at the same time; what the efficiency is counted by."""
    responsibility_ratio: float
    """Live pairs of the whole over those of the busiest task."""
    balance: float
    """Live pairs of the busiest task over the mean."""
    predicted_bytes: int | None
    """Predicted peak of the task that needs most; ``None`` of a backward pass."""
    peak_bytes: int
    """Measured peak of the task that needs most, with what it received."""
    peak_ratio: float | None
    """Measured over predicted peak, of the task where that is furthest from 1."""
    bytes_in: int
    """Bytes that a task receives, the most of all tasks."""
    bytes_out: int
    """Bytes that a task returns, likewise."""
    slowest_ms: float
    """Computation of the slowest task."""
    mean_ms: float
    """Computation of a task on average."""
    merge_ms: float | None
    """See :class:`Turn`, as for the next."""
    transfer_ms: float | None
    one_ms: float
    dense_ms: float
    speedup: float
    """Time of one worker over the time of all."""

    @property
    def passes(self) -> str:
        """``"forward"`` or ``"backward"``."""
        return self.benchmark.removeprefix(f"{_BENCHMARK} ")

    @property
    def key(self) -> tuple[int, str]:
        """What tells the rows of one report apart."""
        return self.num_tasks, self.passes

    @property
    def held_share(self) -> float:
        """The longest subsequence over the whole sequence."""
        return self.held_tokens / self.tokens

    @property
    def time_balance(self) -> float:
        """Time of the slowest task over the mean."""
        return self.slowest_ms / self.mean_ms

    @property
    def speedup_over_dense(self) -> float:
        """Time of one dense call over the time of all workers."""
        return 1 / self.ratio

    @property
    def efficiency(self) -> float:
        """Speed-up over one task, for each device."""
        return self.speedup / self.num_devices

    def make_plan(self) -> Plan:
        """Return the plan that was measured."""
        return make_plan(
            self.tokens,
            num_tasks=self.num_tasks,
            is_causal=self.is_causal,
            pattern=self.settings.make_pattern(),
            tile=self.tile,
        )


def make_row(
    settings: Settings,
    passes: str,
    plan: Plan,
    *,
    turns: Sequence[Turn],
    held: Sequence[Held],
    num_devices: int,
    details: dict[str, float] | None = None,
) -> ScalingRow:
    """Sum up what was measured with one worker count.

    Args:
        settings: What was measured.
        passes: ``"forward"`` or ``"backward"``.
        plan: How it was cut.
        turns: The repeats.
        held: Of each task, as the seconds of tasks; those without work may be left out.
        num_devices: How many computed at the same time.
        details: What only this executor measures.
    """
    predicted = [(each.predicted, each.peak) for each in held if each.predicted]
    ratios = [peak / expected for expected, peak in predicted]
    live_pairs = [task.live_pairs for task in plan.tasks]
    seconds_of_tasks = median_seconds([turn.tasks for turn in turns])

    return ScalingRow(
        benchmark=f"{_BENCHMARK} {passes}",
        baseline="one dense call",
        ratio=statistics.median(turn.whole / turn.dense for turn in turns),
        details=details or {},
        num_devices=num_devices,
        held_tokens=max(task.held_tokens for task in plan.tasks),
        responsibility_ratio=plan.responsibility_ratio,
        balance=max(live_pairs) / statistics.mean(live_pairs),
        predicted_bytes=max((expected for expected, _ in predicted), default=None),
        peak_bytes=max(each.peak for each in held),
        peak_ratio=max(ratios, key=lambda ratio: abs(ratio - 1), default=None),
        bytes_in=max(each.received for each in held),
        bytes_out=max(each.returned for each in held),
        slowest_ms=1e3 * max(seconds_of_tasks),
        mean_ms=1e3 * sum(seconds_of_tasks) / plan.num_tasks,
        merge_ms=_milliseconds([turn.merge for turn in turns]),
        transfer_ms=_milliseconds([turn.transfer for turn in turns]),
        one_ms=1e3 * statistics.median(turn.one for turn in turns),
        dense_ms=1e3 * statistics.median(turn.dense for turn in turns),
        speedup=statistics.median(turn.one / turn.whole for turn in turns),
        **fields_of(settings, plan),
        **summarize([turn.whole for turn in turns]),  # type: ignore[arg-type]
    )


def median_seconds(turns: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each task, given the seconds of all tasks in every repeat."""
    return [statistics.median(seconds) for seconds in zip(*turns, strict=True)]


def read_rows(path: Path) -> list[ScalingRow]:
    """Read what :func:`read_kind` reads; forward passes first, by number of workers."""
    rows = read_kind(ScalingRow, path)
    return sorted(rows, key=lambda row: (PASSES.index(row.passes), row.num_tasks))


def read_kind(kind: type[RowKind], path: Path) -> list[RowKind]:
    """Read the rows of a file, none if there is no file; of two with one key the later counts.

    Raises:
        ValueError: if it is no regular file of at most 64 MiB, or a line is no row of this kind;
            the message names it.
    """
    if not path.exists():
        return []
    rows = measurement.read_rows(path, lambda row: [kind(**row)])
    return list({row.key: row for row in rows}.values())


def _milliseconds(seconds: Sequence[float | None]) -> float | None:
    found = [each for each in seconds if each is not None]
    return 1e3 * statistics.median(found) if found else None


def fields_of(settings: Settings, plan: Plan) -> dict[str, Any]:
    """Return what a row takes from the settings, and names as rows of benchmarks do."""
    kind = "causal" if settings.is_causal else "full"
    shape = f"h{settings.num_heads}-kv{settings.num_kv_heads}-d{settings.head_dim}"
    pattern = "" if settings.pattern is None else f" {settings.pattern}"
    return {
        **{each.name: getattr(settings, each.name) for each in fields(Settings)},
        "case": f"{kind}-{settings.tokens}-{shape}{pattern}",
        "num_tasks": plan.num_tasks,
        "tile": plan.tile,
    }
