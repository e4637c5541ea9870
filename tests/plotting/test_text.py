"""No text of a picture overlaps another or leaves the figure."""

from itertools import combinations

import matplotlib.pyplot as plt
import pytest
from case_rows import make_cases
from matplotlib.text import Text
from scaling_rows import MANY, make_rows
from timeline_reports import make_report

from benchmarks.plots import case_study
from benchmarks.plots.memory import plot_memory
from cqs import make_plan
from cqs.patterns import bigbird, longformer, sliding_window, strided
from cqs.plotting import (
    plot_density,
    plot_owners,
    plot_timeline,
)
from cqs.report import sections
from cqs.report.sections import Section

pytestmark = pytest.mark.slow

NUM_TASKS = (3, 7, 13, 31, 111)
LENGTHS = (10, 100, 1000, 10**6)
CASES = ("plot_active_memory", "plot_longest", "plot_longest_times", "plot_ratios")


@pytest.fixture
def check_text(monkeypatch):
    """Draw the figure of some axes; compare the extents of all texts that are drawn."""
    drawn = []
    draw = Text.draw
    monkeypatch.setattr(
        Text, "draw", lambda text, renderer: (drawn.append(text), draw(text, renderer))
    )

    def check(axes):
        figure = axes.figure
        drawn.clear()
        figure.canvas.draw()
        texts = {
            id(text): (text.get_text(), text.get_window_extent())
            for text in drawn
            if text.get_visible() and text.get_text().strip()
        }
        assert texts
        width, height = figure.canvas.get_width_height()
        for text, box in texts.values():
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
        for (text, box), (other, other_box) in combinations(texts.values(), 2):
            assert not box.padded(-1).overlaps(other_box), (text, other)

    return check


@pytest.mark.sample(5)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_tasks", NUM_TASKS)
@pytest.mark.parametrize("pattern", [None, longformer(512, 64)], ids=["dense", "pattern"])
def test_owners(check_text, num_tasks, length, pattern):
    check_text(plot_owners(make_plan(length, num_tasks=num_tasks, pattern=pattern)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_tasks", [3, 13, 16])
@pytest.mark.parametrize("lengths", [(10, 10), (1000, 3000), (10**6, 10**6)], ids=str)
def test_owners_of_causal_attention(check_text, num_tasks, lengths):
    check_text(plot_owners(make_plan(*lengths, num_tasks=num_tasks, is_causal=True)))


@pytest.mark.parametrize("length", LENGTHS)
def test_small_panels(check_text, length):
    figure, panels = plt.subplots(2, 3, figsize=(12, 8), layout="compressed")
    for panel, num_tasks in zip(panels.flat, NUM_TASKS, strict=False):
        plot_owners(make_plan(length, num_tasks=num_tasks), panel)
    check_text(plot_density(longformer(512, 64), length, axes=panels.flat[-1]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "pattern",
    [
        sliding_window(9, 0),
        bigbird(block=64, random_blocks=2),
        strided(512) | longformer(512, 64) | sliding_window(1000, 1000),
    ],
    ids=["short", "long", "union"],
)
def test_densities(check_text, pattern, length):
    check_text(plot_density(pattern, length))


@pytest.mark.parametrize("num_processes", [2, 111])
@pytest.mark.parametrize("num_tasks", NUM_TASKS)
def test_timelines(check_text, num_tasks, num_processes):
    report = make_report(num_tasks, min(num_processes, num_tasks))
    check_text(plot_timeline(report))
    failure = 1, "node 0", report.seconds / 2, (0, 1)
    check_text(plot_timeline(make_report(num_tasks, min(num_processes, num_tasks), [failure])))


@pytest.mark.parametrize("size", [10**3, 10**7, 10**11])
def test_memory(check_text, size):
    samples = [(0.0, 0), (0.01, size), (1.0, size // 2)]
    axes = plot_memory(samples, predicted_bytes=size, label="task 110")
    check_text(plot_memory([(0.0, size // 3), (9.0, 0)], axes, label="task 109"))


@pytest.mark.parametrize("workers", [(7,), MANY], ids=["one", "many"])
@pytest.mark.parametrize(
    "name", [name for name, value in vars(sections).items() if isinstance(value, Section)]
)
def test_scaling(check_text, name, workers):
    check_text(getattr(sections, name).plot(make_rows(workers, executor="ray")))


@pytest.mark.sample(4)
@pytest.mark.parametrize("tokens", [(10,), (10_000,), (10**6, 10**7)], ids=str)
@pytest.mark.parametrize("workers", [(7,), (1, 4, 7, 8, 31), (1, 3, 7, 13, 31, 111)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_case_study(check_text, name, workers, tokens):
    rows = make_cases(tokens, workers)
    check_text(getattr(case_study, name)(rows[: len(workers)] if "memory" in name else rows))
