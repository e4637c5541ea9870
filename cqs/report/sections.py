"""Content of a scaling report: sections with tables and pictures, and facts."""

import shlex
from collections.abc import Iterable, Sequence

from cqs.report import charts
from cqs.report.charts import QUANTITIES, Chart
from cqs.report.content import Chapter, Content, RowAxis, Section, Show, span
from cqs.report.measurement import format_rows
from cqs.report.rows import PASSES, ReportRow, ScalingRow

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
    by_workers = [row for _, row in sorted({row.num_tasks: row for row in rows}.items())]
    chapters = [Chapter("Distribution of the work", _WORKERS, by_workers, (_SHARES,))]
    for name in PASSES:
        if of_pass := [row for row in rows if row.passes == name]:
            has_parts = all("actors" in row.details for row in of_pass)
            sections = (_MEMORY, _TRAFFIC, _TIME, _SPEEDUP, *[_RUN] * has_parts)
            chapters.append(Chapter(f"{name.capitalize()} pass", _WORKERS, of_pass, sections))
    workers = [row.num_tasks for row in by_workers]
    noun = "worker" if workers[-1] == 1 else "workers"
    return Content(
        title=f"Attention over {rows[0].tokens:,} tokens by {span(workers)} {noun}",
        method=METHODS[rows[0].executor],
        facts=facts(rows),
        command=command(rows, out),
        chapters=chapters,
        plans=[row.make_plan() for row in by_workers],
    )


def facts(rows: Sequence[ReportRow]) -> dict[str, str]:
    """Return problem, machine, versions and other facts of a report's rows, by name."""

    def distinct(texts: Iterable[str], between: str = ", ") -> str:
        return between.join(sorted({*texts} - {""}))

    row = rows[0]
    heads = f"{row.num_heads} heads of {row.head_dim}"
    if row.num_kv_heads != row.num_heads:
        heads += f", {row.num_kv_heads} of keys and values"
    kind = "causal" if row.is_causal else "full"
    if row.pattern is not None:
        kind = f"{row.pattern}{' & causal()' if row.is_causal else ''}"
    versions = [
        {"cqs": each.cqs_version, "torch": each.torch_version} | each.versions for each in rows
    ]
    actors = sorted({int(each.details["actors"]) for each in rows if "actors" in each.details})
    found = {
        "Warning": distinct((each.warning for each in rows), "; "),
        "Problem": f"{span([each.tokens for each in rows])} tokens, {heads}, {row.dtype}",
        "Attention": kind,
        "Executor": row.executor + (f", {' or '.join(map(str, actors))} actors" if actors else ""),
        "Machine": distinct(each.device for each in rows),
        "Versions": distinct(f"{name} {each[name]}" for each in versions for name in each),
        "Commit": distinct(each.commit for each in rows) or "unknown",
        "Seed": str(row.seed),
        "Repeats": f"{row.repeats}; medians are shown",
        "Measured": distinct((min(r.utc for r in rows), max(r.utc for r in rows)), " to "),
    }
    return {name: fact for name, fact in found.items() if fact}


def summarize_rows(rows: Rows) -> str:
    """Return a text table of the main quantities, for the terminal."""
    columns: dict[str, Show] = {
        "W": lambda row: str(row.num_tasks),
        "pass": lambda row: row.passes,
        "tokens": QUANTITIES["share"],
        "ratio": QUANTITIES["responsibility ratio"],
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


def _section(title: str, text: str, names: Sequence[str], *drawn: Chart) -> Section:
    columns: dict[str, Show] = {name: QUANTITIES[name] for name in names}
    return Section(title, text, columns, {chart.caption: chart.plot for chart in drawn})


_WORKERS = RowAxis("W", "number of workers W", lambda row: str(row.num_tasks))
_SHARES = _section(
    "Longest subsequence and balance",
    "Tokens that the largest task reads, and their share of the sequence; the responsibility ratio "
    "(live pairs of the whole problem divided by those of the busiest task, W if balanced); and "
    "the live pairs of the busiest task divided by the mean.",
    ("tokens", "share", "responsibility ratio", "busiest / mean"),
    charts.HELD_TOKENS,
    charts.RESPONSIBILITY,
)
_MEMORY = _section(
    "Memory",
    "Largest peak memory of a task, including its inputs. Predictions exist for forward passes, "
    "and count tensors without the scratch of kernels (up to 0.6 MiB per thread for PyTorch on "
    "CPUs). Measured / predicted is that of the task with the largest deviation from 1.",
    ("predicted MiB", "measured MiB", "measured / predicted"),
    charts.PEAK_BYTES,
)
_TRAFFIC = _section(
    "Traffic",
    "Most bytes that a task receives and returns, including its own shard.",
    ("MiB in", "MiB out"),
    charts.TRAFFIC,
)
_TIME = _section(
    "Time",
    "Time in milliseconds of the slowest task, the mean task and the merge. Transfer is the time "
    "of a call in which the slowest device does not compute. Missing values were not timed "
    "separately.",
    ("slowest", "mean", "slowest / mean", "merge", "transfer"),
    charts.TIMES,
    charts.BALANCE,
)
_SPEEDUP = _section(
    "Speed-up",
    "Time of all workers in milliseconds; speed-up compared with one task and with one dense call "
    "of PyTorch's scaled_dot_product_attention, which also computes masked pairs; and parallel "
    "efficiency, the speed-up over one task divided by the number of devices.",
    ("ms", "over one task", "over dense", "devices", "efficiency"),
    charts.SPEEDUP,
    charts.EFFICIENCY,
)
_RUN = _section(
    "Parts of a run",
    "Time in milliseconds before the slowest actor's first task (planning, put, fetch), of its "
    "computation, between its tasks (fetch, return), and after its last task (return, other "
    "actors, last merges).",
    ("before", "computing", "between", "after"),
    charts.RUN_PARTS,
)
