"""The findings of a report, in sentences."""

from collections.abc import Sequence

from cqs.report.rows import ScalingRow
from cqs.report.sections import QUANTITIES
from cqs.report.table import digits, percent


def main_row(rows: Sequence[ScalingRow]) -> ScalingRow:
    """Return the row that the findings describe: the most tasks of the first pass."""
    first = [row for row in rows if row.passes == rows[0].passes]
    return max(first, key=lambda row: row.num_tasks)


def find(rows: Sequence[ScalingRow]) -> list[str]:
    """Return sentences on memory, speed-up and merge, and a caveat if the machine was loaded.

    Args:
        rows: At least one row, all of one report, sorted by pass.
    """
    row = main_row(rows)
    tasks = "1 task" if row.num_tasks == 1 else f"{row.num_tasks} tasks"
    devices = "1 device" if row.num_devices == 1 else f"{row.num_devices} devices"
    warning = max(rows, key=lambda row: row.load_average or 0).warning
    take = "would take" if row.executor == "local" else "take"  # each task was timed alone
    return [
        f"Memory: with {tasks}, a task holds at most {QUANTITIES['measured MiB'](row)} MiB, "
        f"{QUANTITIES['share of one task'](row)} of the peak of the whole problem as one task.",
        f"Speed-up: {devices} {take} {digits(row.median_ms)} ms for the {row.passes} pass in "
        f"{tasks}, and one device {digits(row.one_ms)} ms for one task: "
        f"{digits(row.speedup)} times as fast (ratio of the medians).",
        f"Merge: {percent(row.merge_share)} of the time for {tasks} merges their results.",
        *[f"Caveat: times are {warning}; measure again on an idle machine."] * bool(warning),
    ]
