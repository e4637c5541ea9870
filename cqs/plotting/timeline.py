"""Timeline of the tasks of a run, as a plot or a trace."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cqs.files import replace_file
from cqs.plotting.colors import letter_color, task_colors
from cqs.plotting.figures import new_axes, points_across, write_centred

if TYPE_CHECKING:
    from cqs.executors.ray.tasks.report import RunReport, TaskReport

_Span = tuple[str, float, float, dict[str, Any]]
"""Name, start and duration in seconds since the call, and details."""
_NAME_POINTS = 7
"""Height of a number in points."""
_NAMED = 32
"""Most rows in which task numbers are drawn."""


def plot_timeline(report: "RunReport", axes: Any = None) -> Any:
    """Plot a bar for each task of a run, in the row of the process that computed it.

    Bars have the colour of their task in :func:`plot_owners`, and its number if there is space. A
    row is grey while the process computes nothing: it waits for inputs or for other processes at
    the end, it has failed, or it has not started yet. Times are those of the processes' clocks, so
    rows of different hosts are shifted by the difference of their clocks.

    Args:
        report: Report of a call on a cluster, ``AttentionFuture.report``.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    from matplotlib.ticker import MaxNLocator

    rows = _tasks_by_process(report)
    axes = new_axes((9, min(1.6 + 0.25 * len(rows), 12))) if axes is None else axes
    colors = task_colors(max((task.index for task in report.tasks), default=0) + 1)
    starts = [task.started - report.started for task in report.tasks]
    ends = [task.started + task.seconds - report.started for task in report.tasks]
    axes.set(
        xlim=(min([0.0, *starts]), max([report.seconds, *ends])),
        ylim=(max(len(rows), 1) - 0.5, -0.5),
        xlabel="seconds since the call",
        ylabel="process",
        title=_summary(report, len(rows)),
    )
    axes.yaxis.set_major_locator(MaxNLocator(_NAMED, integer=True, steps=[1, 2, 5, 10]))
    points = points_across(axes)[0] / axes.viewLim.width
    for row, tasks in enumerate(rows):
        axes.barh(row, report.seconds, color="0.88")
        for task in tasks:
            start, name = task.started - report.started, str(task.index)
            color = colors[task.index]
            axes.barh(row, task.seconds, left=start, color=color)
            has_room = (len(name) + 0.5) * _NAME_POINTS <= task.seconds * points
            if has_room and len(rows) <= _NAMED:
                style = {"fontsize": _NAME_POINTS, "color": letter_color(color)}
                write_centred(axes, (start + task.seconds / 2, row), name, **style)
    return axes


def save_trace(report: "RunReport", path: str | Path) -> None:
    """Write a run as a trace for https://ui.perfetto.dev and chrome://tracing.

    The format is the "Trace Event Format" of Chrome: JSON with microseconds since the start of the
    call. Each process has its tasks, with the fields of their reports, and between them its
    waiting times, as in :func:`plot_timeline`. The driver's row is the whole call.

    Args:
        report: Report of a call on a cluster, ``AttentionFuture.report``.
        path: The file, which is overwritten; its name usually ends in ``.json``.

    Raises:
        ValueError: The path exists and is not a regular file.
        OSError: The file cannot be written.
    """
    names = "put_seconds", "get_seconds", "merge_seconds", "failures", "reruns"
    driver = {name: getattr(report, name) for name in names}
    rows: dict[str, Iterable[_Span]] = {"driver": [("call", 0.0, report.seconds, driver)]}
    for tasks in _tasks_by_process(report):
        rows[f"process {tasks[0].pid}, {tasks[0].device}"] = _spans(report, tasks)
    events: list[dict[str, Any]] = []
    for row, (title, spans) in enumerate(rows.items()):
        place = {"pid": row, "tid": 0}
        events.append({"ph": "M", "name": "process_name", "args": {"name": title}, **place})
        for name, start, seconds, details in spans:
            times = {"ts": 1e6 * start, "dur": 1e6 * seconds}
            kind = {"ph": "X", "name": name, "cat": name.split()[0]}
            events.append({**kind, **times, "args": details, **place})
    with replace_file(path) as partial:
        partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _spans(report: "RunReport", tasks: "list[TaskReport]") -> Iterator[_Span]:
    """Yield the tasks of a process, and its waiting times before, between and after them."""
    free = 0.0
    for task in tasks:
        start = task.started - report.started
        if start > free:
            yield "waiting", free, start - free, {}
        yield f"task {task.index}", start, task.seconds, asdict(task)
        free = start + task.seconds
    if report.seconds > free:
        yield "waiting", free, report.seconds - free, {}


def _tasks_by_process(report: "RunReport") -> "list[list[TaskReport]]":
    """Return the tasks of each process in order of time; processes in order of their first task."""
    by_pid: dict[int, list[TaskReport]] = defaultdict(list)
    for task in sorted(report.tasks, key=lambda task: task.started):
        by_pid[task.pid].append(task)
    return list(by_pid.values())


def _summary(report: "RunReport", num_processes: int) -> str:
    computed = sum(task.seconds for task in report.tasks)
    share = computed / (report.seconds * num_processes) if num_processes else 0.0
    text = (
        f"{len(report.tasks)} tasks on {num_processes} processes in {report.seconds:.3g} s, "
        f"computing {100 * share:.0f} % of the time"
    )
    if report.failures:
        text += f"\nfailed workers: {report.failures}, re-executed tasks: {report.reruns}"
    return text
