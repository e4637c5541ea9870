"""Pictures of rows show what the rows say."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from scaling_rows import MANY, make_rows

from cqs.report import sections
from cqs.report.sections import Section

ROWS = make_rows(executor="ray")
SECTIONS = {name: each for name, each in vars(sections).items() if isinstance(each, Section)}


def lines_of(axes):
    """The numbers of each line by number of workers, by what the legend calls it."""
    handles, labels = axes.get_legend_handles_labels()
    return {
        label: dict(zip(*handle.get_data(), strict=True))
        for handle, label in zip(handles, labels, strict=True)
    }


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_a_picture_has_the_numbers_of_the_rows(section):
    _, axes = plt.subplots()
    assert section.plot(ROWS, axes) is axes
    assert lines_of(axes) == {
        name: {row.num_tasks: sections.QUANTITIES[name].of(row) for row in ROWS}
        for name in section.lines
    }


@pytest.mark.parametrize(
    ("section", "cells"),
    [
        (sections.SHARES, ["7", "3,512", "42.9 %", "6.995", "1.001"]),
        (sections.MEMORY, ["7", "24.2", "25.2", "1.041", "38.8 %"]),
        (sections.TRAFFIC, ["7", "12.1", "4.8"]),
        (sections.TIMES, ["7", "186", "173", "1.07", "7.00", "14.0"]),
        (sections.SPEEDUP, ["7", "200", "6.00", "5.50", "2", "300 %"]),
    ],
)
def test_a_table_has_the_numbers_of_the_rows(section, cells):
    header, *lines = section.table(ROWS)
    assert header == ["W", *section.columns] and lines[MANY.index(7)] == cells


def test_what_no_row_has_is_neither_drawn_nor_tabulated():
    backward = make_rows(passes="backward")
    assert set(lines_of(sections.MEMORY.plot(backward))) == {"measured MiB"}
    assert set(lines_of(sections.TIMES.plot(backward))) == {"slowest", "mean", "merge"}
    assert sections.MEMORY.table(backward)[0] == ["W", "measured MiB", "share of one task"]
    assert sections.TIMES.table(backward)[0] == ["W", "slowest", "mean", "slowest / mean", "merge"]


def test_times_of_zero_have_no_place_on_a_logarithmic_axis():
    rows = [replace(row, merge_ms=0.0) if row.num_tasks == 4 else row for row in ROWS]
    _, axes = plt.subplots()
    sections.TIMES.plot(rows, axes)
    assert set(lines_of(axes)["merge"]) == {row.num_tasks for row in ROWS} - {4}
