"""Timelines show when every task was computed, and where."""

import dataclasses
import json

import pytest
from matplotlib.colors import to_hex
from timeline_reports import make_report

from cqs.plotting import plot_timeline, save_trace
from cqs.plotting.colors import task_colors


def test_every_task_has_a_bar_in_the_row_of_its_process():
    report = make_report(31, 4)
    axes = plot_timeline(report)
    drawn = {}
    for bar in axes.patches:
        if (color := to_hex(bar.get_facecolor())) != "#e0e0e0":
            row = bar.get_y() + bar.get_height() / 2
            drawn[color] = (round(row), bar.get_x(), bar.get_width())
    assert len(drawn) == 31
    processes = list(report.by_process)
    for task, color in zip(report.tasks, task_colors(31), strict=True):
        started = task.started - report.started
        row = processes.index((task.node, task.pid))
        assert drawn[color] == pytest.approx((row, started, task.seconds))
    share = sum(task.seconds for task in report.tasks) / report.seconds / 4
    assert f"computing {100 * share:.0f} % of the time" in axes.get_title()
    assert "failed" not in axes.get_title()


def test_a_failed_worker_without_a_result_has_a_row_with_a_cross():
    never_started = None, None, 1.0, ()
    report = make_report(9, 3, [(1, "node 0", 1.5, (2, 7)), never_started])
    axes = plot_timeline(report)
    (cross,) = (line for line in axes.lines if line.get_marker() == "x")
    assert tuple(cross.get_xydata()[0]) == pytest.approx((1.5, 0))
    outlined = {to_hex(b.get_facecolor()) for b in axes.patches if b.get_linewidth() == 1.5}
    assert outlined == {task_colors(9)[index] for index in (2, 7)}
    assert axes.get_title().startswith("9 tasks on 4 workers")
    assert "failed workers: 2 (cross), re-executed tasks: 2 (outlined)" in axes.get_title()


def test_a_run_without_tasks_can_be_drawn(tmp_path):
    report = dataclasses.replace(make_report(3, 3), tasks=(), seconds=0.01)
    plot_timeline(report).figure.savefig(tmp_path / "timeline.png")
    save_trace(report, tmp_path / "trace.json")


def test_a_trace_has_every_task_in_the_row_of_its_process(tmp_path):
    """Keys and phases are those of the Trace Event Format: complete events and metadata."""
    report = make_report(31, 4)
    save_trace(report, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    processes = [f"process {pid}, cpu" for _, pid in report.by_process]
    assert list(names.values()) == ["driver", *processes]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) + len(names) == len(events)
    assert len(spans) == len(report.tasks) + len(report.merges) + 1
    for task in report.tasks:
        (event,) = (event for event in spans if event["name"] == f"task {task.index}")
        assert names[event["pid"]] == f"process {task.pid}, cpu"
        assert event["ts"] == 1e6 * (task.started - report.started)
        assert event["dur"] == 1e6 * task.seconds and event["args"]["peak_bytes"] == task.peak_bytes
    (call,) = (event for event in spans if event["name"] == "call")
    assert call["args"]["failures"] == [] and call["args"]["put_seconds"] == 0.01
    (merge,) = (event for event in spans if event["name"] == "merge")
    assert names[merge["pid"]] == "process 4000, cpu" and merge["dur"] == 1e6 * 0.03


def test_processes_of_two_nodes_with_the_same_pid_are_two():
    """As in containers, each of which numbers its processes from one."""
    report = make_report(2, 2)
    assert len({task.pid for task in report.tasks}) == 1
    longest = max(task.seconds for task in report.tasks)
    assert report.slowest["compute"] == longest and report.slowest["waiting"] > 0
    assert len(report.by_process) == 2
