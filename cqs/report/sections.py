"""Content of a scaling report: sections with tables and pictures, and facts."""

import shlex
from collections.abc import Iterable, Sequence

from cqs.report import scaling
from cqs.report.content import NOTHING, Chapter, Content, Picture, RowAxis, Section, span
from cqs.report.measurement import format_rows
from cqs.report.rows import PASSES, ReportRow, ScalingRow
from cqs.report.table import mebibytes, percent

Rows = Sequence[ScalingRow]

METHODS = {
    "local": "All tasks ran in one process one after another, each timed alone on the device. The "
    "time of all workers is that of the slowest task plus 1/W of the merge, which W devices would "
    "share. There was no communication.",
    "ray": "Tasks ran on the actors of a Ray cluster. The time of all workers is that of a whole "
    "call, from tensors on the driver to the result there. The time of one worker is that of a "
    "call with one task. Merges on the driver overlap with computation.",
    "distributed": "Every rank of a process group computed its own task of a cyclic quorum set, "
    "with a head-parallel degree of 1. The time of all workers is that of the slowest rank, "
    "measured from a barrier. One worker and the dense call were timed on one rank while the "
    "others waited. The time and memory of each rank's task were also measured alone.",
}
"""Description of the measurement of each executor."""


def describe(rows: Rows, out: str) -> Content:
    """Return the content of a report.

    Args:
        rows: At least one row, all with equal settings.
        out: Directory of the report, for the command that reproduces it.
    """
    plans = {row.num_tasks: row.make_plan() for row in rows}
    return Content(
        title=_title(rows),
        method=METHODS[rows[0].executor],
        facts=facts(rows),
        command=command(rows, out),
        chapters=_chapters(rows),
        plans=[plan for _, plan in sorted(plans.items())],
    )


def _title(rows: Rows) -> str:
    workers = [row.num_tasks for row in rows]
    noun = "worker" if max(workers) == 1 else "workers"
    return f"Attention over {rows[0].tokens:,} tokens by {span(workers)} {noun}"


def _chapters(rows: Rows) -> list[Chapter]:
    plans = {row.num_tasks: row for row in rows}
    by_workers = [plans[number] for number in sorted(plans)]
    found = [Chapter("Distribution of the work", _WORKERS, by_workers, (_SHARES,))]
    for name in PASSES:
        of_pass = [row for row in rows if row.passes == name]
        if not of_pass:
            continue
        sections = [_MEMORY, _TRAFFIC, _TIME, _SPEEDUP]
        if all("actors" in row.details for row in of_pass):
            sections.append(_RUN)
        found.append(Chapter(f"{name.capitalize()} pass", _WORKERS, of_pass, tuple(sections)))
    return found


def facts(rows: Sequence[ReportRow]) -> dict[str, str]:
    """Return problem, machine, versions and other facts of a report's rows, by name."""
    row = rows[0]
    heads = f"{row.num_heads} heads of {row.head_dim}"
    if row.num_kv_heads != row.num_heads:
        heads += f", {row.num_kv_heads} of keys and values"
    kind = "causal" if row.is_causal else "full"
    if row.pattern is not None:
        kind = f"{row.pattern}{' & causal()' if row.is_causal else ''}"
    versions = sorted(
        {
            f"{name} {version}"
            for each in rows
            for name, version in {
                "cqs": each.cqs_version,
                "torch": each.torch_version,
                **each.versions,
            }.items()
        }
    )
    executor = row.executor
    if "actors" in row.details:
        executor += f", {_numbers(each.details['actors'] for each in rows)} actors"
    warnings = sorted({each.warning for each in rows} - {""})
    return {
        **({"Warning": "; ".join(warnings)} if warnings else {}),
        "Problem": f"{span([each.tokens for each in rows])} tokens, {heads}, {row.dtype}",
        "Attention": kind,
        "Executor": executor,
        "Machine": ", ".join(sorted({each.device for each in rows})),
        "Versions": ", ".join(versions),
        "Commit": ", ".join(sorted({each.commit for each in rows})) or "unknown",
        "Seed": str(row.seed),
        "Repeats": f"{row.repeats}; medians are shown",
        "Measured": " to ".join(sorted({min(r.utc for r in rows), max(r.utc for r in rows)})),
    }


def summarize_rows(rows: Rows) -> str:
    """Return a text table of the main quantities, for the terminal."""
    columns = {
        "W": lambda row: str(row.num_tasks),
        "pass": lambda row: row.passes,
        "tokens": lambda row: percent(row.held_share),
        "ratio": lambda row: f"{row.responsibility_ratio:.4g}",
        **_MEMORY.columns,
        **_SPEEDUP.columns,
    }
    return format_rows(rows, columns)


def command(rows: Rows, out: str) -> str:
    """Return the command that repeats the measurements; one line per number of ranks.

    Args:
        rows: Rows of one report.
        out: Directory of the new report.
    """
    options = ["--seqlen", str(rows[0].tokens), "--executor", rows[0].executor]
    options += rows[0].options
    workers = sorted({row.num_tasks for row in rows})
    if "actors" in rows[0].details:
        options += ["--actors", f"{rows[-1].details['actors']:.0f}"]
    if any(row.passes == "backward" for row in rows):
        options.append("--backward")
    options += ["--out", out]
    if rows[0].executor != "distributed":
        return shlex.join(["cqs", "report", "--tasks", ",".join(map(str, workers)), *options])
    return "\n".join(
        shlex.join(["torchrun", "--nproc-per-node", str(number), "-m", "cqs", "report", *options])
        for number in workers
    )


def _numbers(numbers: Iterable[float]) -> str:
    return " or ".join(f"{number:.0f}" for number in sorted(set(numbers)))


def digits(number: float | None) -> str:
    """Return a number with three significant digits as text, or a dash for None.

    Example:
        >>> [digits(number) for number in (0.0123, 1.5, 2345.6, None)]
        ['0.0123', '1.50', '2,346', '-']
    """
    if number is None:
        return NOTHING
    size = abs(number)
    if size < 1e-4:
        return "0"
    decimals = next((n for n, least in enumerate((100, 10, 1, 0.1)) if size >= least), 4)
    return f"{number:,.{decimals}f}"


def _mebibytes(number: int | None) -> str:
    return NOTHING if number is None else mebibytes(number)


_WORKERS = RowAxis("W", "number of workers W", lambda row: str(row.num_tasks))
_SHARES = Section(
    "Longest subsequence and balance",
    "Tokens that the largest task reads, and their share of the sequence; the responsibility ratio "
    "(live pairs of the whole problem divided by those of the busiest task, W if balanced); and "
    "the live pairs of the busiest task divided by the mean.",
    {
        "tokens": lambda row: f"{row.held_tokens:,}",
        "share": lambda row: percent(row.held_share),
        "responsibility ratio": lambda row: f"{row.responsibility_ratio:.4g}",
        "busiest / mean": lambda row: f"{row.balance:.3f}",
    },
    (
        Picture(scaling.plot_held_tokens, "Longest subsequence, compared with 1 / sqrt(W)"),
        Picture(scaling.plot_responsibility, "Responsibility ratio, compared with W"),
    ),
)
_MEMORY = Section(
    "Memory",
    "Largest peak memory of a task, including its inputs. Predictions exist for forward passes, "
    "and count tensors without the scratch of kernels (up to 0.6 MiB per thread for PyTorch on "
    "CPUs). Measured / predicted is that of the task with the largest deviation from 1.",
    {
        "predicted MiB": lambda row: _mebibytes(row.predicted_bytes),
        "measured MiB": lambda row: _mebibytes(row.peak_bytes),
        "measured / predicted": lambda row: (
            NOTHING if row.peak_ratio is None else f"{row.peak_ratio:.3f}"
        ),
    },
    (Picture(scaling.plot_peak_bytes, "Peak memory of a task"),),
)
_TRAFFIC = Section(
    "Traffic",
    "Most bytes that a task receives and returns, including its own shard.",
    {
        "MiB in": lambda row: _mebibytes(row.bytes_in),
        "MiB out": lambda row: _mebibytes(row.bytes_out),
    },
    (Picture(scaling.plot_traffic, "Bytes that a task receives and returns"),),
)
_TIME = Section(
    "Time",
    "Time in milliseconds of the slowest task, the mean task and the merge. Transfer is the time "
    "of a call in which the slowest device does not compute. Missing values were not timed "
    "separately.",
    {
        "slowest": lambda row: digits(row.slowest_ms),
        "mean": lambda row: digits(row.mean_ms),
        "slowest / mean": lambda row: f"{row.time_balance:.2f}",
        "merge": lambda row: digits(row.merge_ms),
        "transfer": lambda row: digits(row.transfer_ms),
    },
    (
        Picture(scaling.plot_times, "Time of tasks, merge and transfer"),
        Picture(scaling.plot_balance, "Busiest task divided by the mean, in pairs and in time"),
    ),
)
_SPEEDUP = Section(
    "Speed-up",
    "Time of all workers in milliseconds; speed-up compared with one task and with one dense call "
    "of PyTorch's scaled_dot_product_attention, which also computes masked pairs; and parallel "
    "efficiency, the speed-up over one task divided by the number of devices.",
    {
        "ms": lambda row: digits(row.median_ms),
        "over one task": lambda row: digits(row.speedup),
        "over dense": lambda row: digits(row.speedup_over_dense),
        "devices": lambda row: str(row.num_devices),
        "efficiency": lambda row: percent(row.efficiency),
    },
    (
        Picture(scaling.plot_speedup, "Speed-up, compared with the number of devices"),
        Picture(scaling.plot_efficiency, "Parallel efficiency"),
    ),
)
_RUN = Section(
    "Parts of a run",
    "Time in milliseconds before the slowest actor's first task (planning, put, fetch), of its "
    "computation, between its tasks (fetch, return), and after its last task (return, other "
    "actors, last merges).",
    {
        "before": lambda row: digits(1e3 * row.details["before_seconds"]),
        "computing": lambda row: digits(1e3 * row.details["slowest_seconds"]),
        "between": lambda row: digits(1e3 * row.details["between_seconds"]),
        "after": lambda row: digits(1e3 * row.details["after_seconds"]),
    },
    (Picture(scaling.plot_run_parts, "Parts of a run on the slowest actor"),),
)
