"""Rows of a benchmark: made of times, printed as a table and appended to a file."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cqs.report.measurement import Measurement, RowKind, append_rows, format_rows, summarize


def make_row(
    seconds: Sequence[float],
    dtype: torch.dtype | str,
    *,
    ratio: float | Sequence[float],
    num_tasks: int = 1,
    **fields: Any,
) -> Measurement:
    """Return the row of a computation.

    Args:
        seconds: Seconds of each repeat.
        dtype: Dtype of the tensors.
        ratio: The ratio to the baseline, or the seconds of each repeat of the baseline.
        num_tasks: Number of tasks or ranks.
        fields: Other fields of :class:`~cqs.report.measurement.Measurement`.
    """
    if isinstance(ratio, Sequence):
        ratio = statistics.median(own / other for own, other in zip(seconds, ratio, strict=True))
    fields = {"repeats": len(seconds), **summarize([*seconds]), **fields}
    name = str(dtype).removeprefix("torch.")
    return Measurement(dtype=name, num_tasks=num_tasks, ratio=ratio, **fields)


def make_columns(*details: str) -> dict[str, Callable[[Measurement], object]]:
    """Return the columns of a table: what every row has, and details.

    Args:
        details: Names of details, or of other fields. Those that end in ``_bytes`` are shown in
            MiB.
    """
    columns: dict[str, Callable[[Measurement], object]] = {
        "case": lambda row: row.case,
        "pass": lambda row: row.benchmark.partition(" ")[2],
        "by": lambda row: row.executor,
        "dtype": lambda row: row.dtype,
        "W": lambda row: row.num_tasks,
        "median ms": lambda row: f"{row.median_ms:.3f}",
        "ratio": lambda row: f"{row.ratio:.3f}",
        "baseline": lambda row: row.baseline,
    }
    headers = [re.sub("_bytes$", "_MiB", name).replace("_", " ") for name in details]
    return columns | {
        header: partial(_show, name) for header, name in zip(headers, details, strict=True)
    }


def _show(name: str, row: Measurement) -> str:
    value = row.details.get(name, getattr(row, name, None))
    if value is None:
        return "-"
    number = value / 2**20 if name.endswith("_bytes") else value
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def publish(
    rows: Sequence[RowKind],
    columns: Mapping[str, Callable[[RowKind], object]],
    out: str | None,
) -> None:
    """Print a table, and append the rows to a file of one JSON object per line.

    Args:
        rows: At least one.
        columns: Header of a column and what it shows of a row.
        out: The file, which is never overwritten, or ``None``.
    """
    append_rows(rows, out)
    print(f"{rows[0].device}, {rows[0].dtype}, torch {rows[0].torch_version}")
    print(format_rows(rows, columns))
