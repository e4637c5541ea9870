"""Content of a report on the memory and time of one worker."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.case_measurement import RESIDENT, TENSORS, CaseRow
from benchmarks.plots import case_study as plots
from cqs.report.content import NOTHING, Chapter, Content, Plot, RowAxis, Section, Show, span
from cqs.report.measurement import format_rows
from cqs.report.sections import facts
from cqs.report.table import digits, mebibytes

Rows = Sequence[CaseRow]

_METHOD = (
    "The task with the longest subsequence of every plan was measured alone on its device, with "
    "the kernels that compute the whole problem on one worker. Groups end at any token, as in the "
    "published study. A time begins when nothing else runs and ends when the device is idle; the "
    "values are medians of the repeats."
)
_COUNTED = {
    TENSORS: "The memory is that of tensors, from the history of PyTorch's allocator.",
    RESIDENT: "The memory is the growth of the resident set of the process, sampled every "
    "millisecond.",
}


class _Length(NamedTuple):
    """The rows of one sequence length."""

    tokens: int
    """Number of tokens."""
    by_workers: dict[int, CaseRow]
    """Rows by number of workers."""


def describe(rows: Rows, out: str) -> Content:
    """Return the content of a report.

    Args:
        rows: At least one row, ascending, with equal settings except the number of tokens.
        out: The directory of the report, for the command that it names.
    """
    lengths = [
        _Length(tokens, {row.num_tasks: row for row in rows if row.tokens == tokens})
        for tokens in dict.fromkeys(row.tokens for row in rows)
    ]
    workers = sorted({row.num_tasks for row in rows})
    axis = RowAxis("N", "number of tokens N", lambda length: f"{length.tokens:,}")
    return Content(
        title=f"One worker of {span(workers)}: memory and time over "
        f"{span([row.tokens for row in rows])} tokens",
        method=_METHOD,
        facts=facts(rows),
        command=command(rows, out),
        chapters=[
            Chapter("Active memory", axis, lengths, _memory_sections(lengths, workers)),
            Chapter("Case study", axis, lengths, _study_sections(workers)),
        ],
    )


def summarize_rows(rows: Rows) -> str:
    """Return a text table of the main quantities, for the terminal."""
    columns: dict[str, Callable[[CaseRow], str]] = {
        "N": lambda row: f"{row.tokens:,}",
        "W": lambda row: str(row.num_tasks),
        "longest": lambda row: f"{row.held_tokens:,}",
        "MiB": lambda row: mebibytes(row.peak_bytes),
        "predicted MiB": lambda row: mebibytes(row.predicted_bytes),
        "ms": lambda row: digits(row.median_ms),
        "vs. whole": lambda row: digits(row.ratio),
    }
    return format_rows(rows, columns)


def command(rows: Rows, out: str) -> str:
    """Return the command that repeats the measurements.

    Args:
        rows: Rows of one report.
        out: Directory of the new report.
    """
    numbers = {
        "--tasks": sorted({row.num_tasks for row in rows}),
        "--seqlen": sorted({row.tokens for row in rows}),
    }
    lists = [word for name, each in numbers.items() for word in (name, ",".join(map(str, each)))]
    options = rows[0].options
    return shlex.join(["python", "-m", "benchmarks", "case-study", *lists, *options, "--out", out])


def _memory_sections(lengths: Sequence[_Length], workers: Sequence[int]) -> tuple[Section, ...]:
    counted = {row.memory for length in lengths for row in length.by_workers.values()}
    pictures: dict[str, Plot] = {
        f"Active memory over time, N = {length.tokens:,}": partial(_plot_memory, number)
        for number, length in enumerate(lengths)
    }
    return (
        Section(
            "Memory of one worker over time",
            "Memory in MiB of the worker with the longest subsequence, from before it receives its "
            "tokens until its results are freed. The curves are those of the fastest repeat; the "
            "table has their peaks. " + " ".join(_COUNTED[name] for name in sorted(counted)),
            _columns(workers, lambda row: mebibytes(row.peak_bytes)),
            pictures,
        ),
        Section(
            "Measured over predicted",
            "Measured peaks divided by predicted peaks. Predictions count tensors without the "
            "scratch of kernels, which is up to 0.6 MiB per thread for PyTorch on CPUs.",
            _columns(workers, lambda row: f"{row.peak_bytes / row.predicted_bytes:.3f}"),
            {},
        ),
    )


def _study_sections(workers: Sequence[int]) -> tuple[Section, ...]:
    return (
        Section(
            "Longest subsequence",
            "Tokens that the worker with the longest subsequence reads. Among equivalent interest "
            "sets the plan uses the one with the shortest longest subsequence.",
            _columns(workers, lambda row: f"{row.held_tokens:,}"),
            {"Longest subsequence": _of_lengths(plots.plot_longest)},
        ),
        Section(
            "Time of the longest task",
            "Time in milliseconds. The task computes the pairs that it owns, not all pairs of its "
            "subsequence.",
            _columns(workers, lambda row: digits(row.median_ms)),
            {"Time of the longest task": _of_lengths(plots.plot_longest_times)},
        ),
        Section(
            "Ratio to the whole",
            "Time of the longest task divided by the time of the whole problem on one worker in "
            "the same repeat. The ideal is 1 / W.",
            _columns(workers, lambda row: digits(row.ratio)),
            {"Time of the longest task over that of the whole": _of_lengths(plots.plot_ratios)},
        ),
    )


def _columns(workers: Sequence[int], show: Callable[[CaseRow], str]) -> dict[str, Show]:
    """Return a column for each number of workers."""

    def of(number: int, length: _Length) -> str:
        row = length.by_workers.get(number)
        return NOTHING if row is None else show(row)

    return {f"W={number}": partial(of, number) for number in workers}


def _of_lengths(plot: Callable[[Rows, Any], Any]) -> Plot:
    return lambda lengths, axes: plot(_rows(lengths), axes)


def _plot_memory(number: int, lengths: Sequence[_Length], axes: Any) -> Any:
    return plots.plot_active_memory(_rows([lengths[number]]), axes)


def _rows(lengths: Sequence[_Length]) -> list[CaseRow]:
    return [row for length in lengths for row in length.by_workers.values()]
