"""Timeline of the tasks of a run, as a plot or a trace."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cqs.files import replace_file
from cqs.plotting.colors import task_colors
from cqs.plotting.figures import new_axes

if TYPE_CHECKING:
    from cqs.executors.ray.tasks.report import RunReport


def plot_timeline(report: "RunReport", axes: Any = None) -> Any:
    """Plot a bar for each task of a run, in the row of the process that computed it.

    Bars have the colour of their task in :func:`plot_owners`. A row is grey while the process
    computes nothing: it waits for inputs or for other processes at the end, it has failed, or it
    has not started yet. Times are those of the processes' clocks, so
    rows of different hosts are shifted by the difference of their clocks.

    Args:
        report: Report of a call on a cluster, ``AttentionFuture.report``.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    from matplotlib.ticker import MaxNLocator

    rows = report.by_process
    row_of = {process: row for row, process in enumerate(rows)}
    axes = new_axes((9, min(1.6 + 0.25 * len(rows), 12))) if axes is None else axes
    colors = task_colors(1 + max((task.index for task in report.tasks), default=0))
    share = sum(task.seconds for task in report.tasks) / (report.seconds * max(len(rows), 1))
    title = (
        f"{len(report.tasks)} tasks on {len(rows)} processes in {report.seconds:.3g} s, "
        f"computing {100 * share:.0f} % of the time"
    )
    if report.failures:
        title += f"\nfailed workers: {report.failures}, re-executed tasks: {report.reruns}"
    axes.set(xlabel="seconds since the call", ylabel="process", title=title, xmargin=0)
    axes.yaxis.set_major_locator(MaxNLocator(32, integer=True, steps=[1, 2, 5, 10]))
    axes.barh(range(len(rows)), report.seconds, color="0.88")
    axes.barh(
        [row_of[task.node, task.pid] for task in report.tasks],
        [task.seconds for task in report.tasks],
        left=[task.started - report.started for task in report.tasks],
        color=[colors[task.index] for task in report.tasks],
    )
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    return axes


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
    names = "put_seconds", "get_seconds", "waiting_seconds", "failures", "reruns"
    driver = {name: getattr(report, name) for name in names}
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
