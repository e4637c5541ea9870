"""Timeline of the tasks of a run, as a plot or a trace."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cqs.files import replace_file
from cqs.plotting.colors import task_colors
from cqs.plotting.figures import new_axes

if TYPE_CHECKING:
    from cqs.executors.ray.tasks.report import RunReport, TaskReport


def plot_timeline(report: "RunReport", axes: Any = None) -> Any:
    """Plot a bar for each task of a run, in the row of the worker that computed it.

    Bars have the colour of their task in :func:`plot_owners`. A row begins when the worker loads
    its first task, later for a worker that has joined the call, and is grey while the worker
    computes nothing: it waits for inputs or for other workers at the end. Times are those of the
    workers' clocks, so rows of different hosts are shifted by the difference of their clocks.

    The row of a failed worker has a cross where the driver noticed the failure. A report has only
    the attempt of each task whose result was used. The row is hatched where work was lost: in the
    time before the failure, and in earlier gaps that are long enough for a task. Tasks that ran
    again are outlined.

    Args:
        report: Report of a call on a cluster, ``AttentionFuture.report``.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    from matplotlib.ticker import MaxNLocator

    rows, row_of = _rows(report)
    axes = new_axes((6, min(1.7 + 0.28 * len(rows), 12))) if axes is None else axes
    colors = task_colors(1 + max((task.index for task in report.tasks), default=0))
    ends = [report.seconds if end is None else end for end, _ in rows]
    share = sum(task.seconds for task in report.tasks) / max(sum(ends), report.seconds)
    title = (
        f"{len(report.tasks)} tasks on {len(rows)} workers in {report.seconds:.3g} s, "
        f"computing {100 * share:.0f} % of the time"
    )
    if report.failures:
        title += f"\nfailed workers: {len(report.failures)} (cross), "
        title += f"re-executed tasks: {report.reruns} (outlined)\nhatched: lost work"
    axes.set(xlabel="seconds since the call", ylabel="worker", xmargin=0)
    axes.set_title(title, fontsize="medium")
    axes.yaxis.set_major_locator(MaxNLocator(32, integer=True, steps=[1, 2, 5, 10]))
    begins = [0.0 if end else tasks[0].started - report.started for end, tasks in rows]
    widths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    axes.barh(range(len(rows)), widths, left=begins, color="0.88")
    bars = axes.barh(
        [row_of[task.node, task.pid] for task in report.tasks],
        [task.seconds for task in report.tasks],
        left=[task.started - report.started for task in report.tasks],
        color=[colors[task.index] for task in report.tasks],
    )
    for bar, task in zip(bars, report.tasks, strict=True):
        if any(task.index in failure.lost_tasks for failure in report.failures):
            bar.set(edgecolor="black", linewidth=1.5)
    for row, (end, tasks) in enumerate(rows):
        if end is not None:
            _draw_failure(axes, row, end, _lost_work(report, tasks, end))
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    return axes


_Row = tuple[float | None, "tuple[TaskReport, ...]"]
"""Seconds from the call to the failure of a worker, or None, and the tasks of the worker."""


def _rows(report: "RunReport") -> tuple[list[_Row], dict[tuple[str, int], int]]:
    """Return the rows of a timeline, and the row of each process that has a task.

    Failed workers without a task come first. The others follow in the order of their first tasks.
    """
    by_process = report.by_process
    end_of: dict[tuple[str | None, int | None], float] = {}
    rows: list[_Row] = []
    for failure in report.failures:
        process, end = (failure.node, failure.pid), failure.noticed - report.started
        if process in by_process:
            end_of[process] = end
        elif failure.pid is not None:  # otherwise it never started
            rows.append((end, ()))
    row_of = {process: row for row, process in enumerate(by_process, len(rows))}
    rows += [(end_of.get(process), tasks) for process, tasks in by_process.items()]
    return rows, row_of


def _lost_work(
    report: "RunReport", tasks: "Sequence[TaskReport]", end: float
) -> list[tuple[float, float]]:
    """Return start and end of the intervals whose work was lost, in seconds since the call.

    Args:
        report: Report of the run.
        tasks: The tasks of a worker whose results were used, in the order of their start.
        end: Time of the worker's failure, in seconds since the call.
    """
    start = min((task.started - report.started for task in report.tasks), default=0.0)
    shortest = min((task.seconds for task in report.tasks), default=0.0)
    lost = []
    for task in tasks:
        began = task.started - report.started
        if began - start > shortest / 2:  # a shorter gap is a wait
            lost.append((start, began))
        start = began + task.seconds
    return [*lost, (start, end)] if end > start else lost


def _draw_failure(axes: Any, row: int, end: float, lost: Sequence[tuple[float, float]]) -> None:
    """Hatch the lost intervals of a failed worker, and draw a cross at its end."""
    axes.barh(
        [row] * len(lost),
        [stop - start for start, stop in lost],
        left=[start for start, _ in lost],
        color="0.88",
        edgecolor="0.35",
        linewidth=0,
        hatch="////",
    )
    axes.plot(end, row, marker="x", color="black", markersize=9, markeredgewidth=2.5, zorder=3)


def save_trace(report: "RunReport", path: str | Path) -> None:
    """Write a run as a trace for https://ui.perfetto.dev and chrome://tracing.

    The format is the "Trace Event Format" of Chrome: JSON with microseconds since the start of the
    call. Each process has its tasks, with the fields of their reports. The driver's row is the
    whole call.

    Args:
        report: Report of a call on a cluster, ``AttentionFuture.report``.
        path: The file, which is overwritten; its name usually ends in ``.json``.

    Raises:
        ValueError: The path exists and is not a regular file.
        OSError: The file cannot be written.
    """
    names = "put_seconds", "get_seconds", "reruns", "rerun_seconds"
    driver = {name: getattr(report, name) for name in names} | {"slowest": report.slowest}
    driver["failures"] = [failure._asdict() for failure in report.failures]
    rows = [("driver", [("call", report.started, report.seconds, driver)])]
    for (_, pid), tasks in report.by_process.items():
        spans = [(f"task {task.index}", task.started, task.seconds, asdict(task)) for task in tasks]
        spans += [
            ("merge", merge.started, merge.seconds, merge._asdict())
            for merge in report.merges_of(tasks[0])
        ]
        rows.append((f"process {pid}, {tasks[0].device}", spans))
    events: list[dict[str, Any]] = []
    for row, (title, spans) in enumerate(rows):
        place = {"pid": row, "tid": 0}
        events.append({"ph": "M", "name": "process_name", "args": {"name": title}, **place})
        for name, start, seconds, details in spans:
            times = {"ts": 1e6 * (start - report.started), "dur": 1e6 * seconds}
            events.append({"ph": "X", "name": name, "args": details, **times, **place})
    with replace_file(path) as partial:
        partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
