"""Fit of the cost model's machine to measured rows of ``peers``."""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cqs.report import measurement
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import METHODS, predict
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import Workload

_FITTED = ("rate", "backward_rate", "per_row", "bandwidth", "latency")
_PENALTY = 1e-3
"""Cost of a parameter that changes by a factor of e; a row with an error of 10 % costs 0.01."""


class MeasuredTime(NamedTuple):
    """A measured time of a method."""

    method: str
    case: Workload
    num_devices: int
    passes: str
    seconds: float

    def ratio(self, machine: Machine) -> float:
        """Return the predicted time over the measured one."""
        found = predict(self.method, self.case, self.num_devices, machine, self.passes)
        assert found is not None, "it was measured"
        return found.seconds / self.seconds


def read_rows(path: str | Path) -> tuple[MeasuredTime, ...]:
    """Read the rows of ``python -m benchmarks peers --out``, except methods without a cost model.

    Raises:
        ValueError: The file has no such rows, or a line is not a row.
    """
    rows = measurement.read_rows(path, _pick)
    if not rows:
        raise ValueError(f"{path} has no rows of `benchmarks peers`")
    return tuple(rows)


@cache
def fit(rows: tuple[MeasuredTime, ...], machine: Machine | None = None) -> Machine:
    """Return the machine with the smallest sum of squared logarithms of predicted / measured.

    Pattern search (Hooke and Jeeves, 1961) over throughputs, time per row, bandwidth within a node
    and latency. Rows of few devices do not determine the last two separately, so a penalty keeps
    all parameters near the start.

    Args:
        rows: Measured times.
        machine: Start of the search, without zeros; ``None`` means the default machine.
    """
    start = machine = machine or Machine()

    def misfit(found: Machine) -> float:
        penalty = sum(math.log(getattr(found, n) / getattr(start, n)) ** 2 for n in _FITTED)
        return sum(math.log(row.ratio(found)) ** 2 for row in rows) + _PENALTY * penalty

    least, factor = misfit(machine), 2.0
    while factor > 1.002:
        neighbours = [
            replace(machine, **{name: getattr(machine, name) * times})
            for name in _FITTED
            for times in (factor, 1 / factor)
        ]
        found, best = min(((misfit(one), one) for one in neighbours), key=lambda pair: pair[0])
        if found < least:
            least, machine = found, best
        else:
            factor = math.sqrt(factor)
    return machine


def _pick(found: dict[str, Any]) -> list[MeasuredTime]:
    """Return the measured time of a row, or an empty list if it is of another benchmark."""
    kind, _, passes = found["benchmark"].partition(" ")
    is_one = found["executor"] == "one"
    if kind != "peers" or not (is_one or found["executor"] in METHODS):
        return []
    match = re.fullmatch(r"(full|causal)-(\d+)-h(\d+)-kv(\d+)-d(\d+)(?:-\w+)?", found["case"])
    if match is None:
        raise ValueError(f"unknown case {found['case']!r}")
    tokens, heads, kv_heads, head_dim = map(int, match.groups()[1:])
    itemsize = 4 if found["dtype"] == "float32" else 2
    shape = AttentionShape(heads, head_dim, num_kv_heads=kv_heads, itemsize=itemsize)
    return [
        MeasuredTime(
            "ring" if is_one else found["executor"],
            Workload(tokens, shape, match[1] == "causal"),
            1 if is_one else int(found["num_tasks"]),
            passes,
            found["median_ms"] / 1e3,
        )
    ]
