"""No text of a picture overlaps another or leaves the figure."""

from functools import partial
from itertools import combinations, product

import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text
from scaling_rows import MANY, make_rows
from timeline_reports import make_report

from cqs import make_plan
from cqs.patterns import longformer, sliding_window, strided
from cqs.plotting import plot_density, plot_owners, plot_timeline
from cqs.report import sections
from cqs.report.sections import Section

pytestmark = pytest.mark.slow


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


def draw_small_panels(length):
    figure, panels = plt.subplots(2, 3, figsize=(12, 8), layout="compressed")
    for panel, num_tasks in zip(panels.flat, NUM_TASKS, strict=False):
        plot_owners(make_plan(length, num_tasks=num_tasks), panel)
    return plot_density(longformer(512, 64), length, axes=panels.flat[-1])


def draw_timeline(num_tasks, num_processes):
    report = make_report(num_tasks, num_processes)
    failure = 1, "node 0", report.seconds / 2, (0, 1)
    return plot_timeline(make_report(num_tasks, num_processes, [failure]))


LENGTHS, NUM_TASKS = (10, 1000, 10**6), (3, 7, 13, 31, 111)
PATTERNS = (longformer(512, 64), strided(512) | sliding_window(1000, 1000))
SECTIONS = [value for value in vars(sections).values() if isinstance(value, Section)]
PICTURES = {
    "owners": [
        partial(plot_owners, make_plan(length, num_tasks=number, pattern=pattern))
        for length, number, pattern in product(LENGTHS, NUM_TASKS, (None, PATTERNS[0]))
    ],
    "causal owners": [
        partial(plot_owners, make_plan(*lengths, num_tasks=number, is_causal=True))
        for lengths, number in product([(10, 10), (1000, 3000)], NUM_TASKS)
    ],
    "panels": [partial(draw_small_panels, length) for length in LENGTHS],
    "densities": [partial(plot_density, *each) for each in product(PATTERNS, LENGTHS)],
    "timelines": [
        partial(draw_timeline, *each) for each in [(3, 2), (31, 2), (111, 2), (111, 111)]
    ],
    "scaling": [
        partial(section.plot, make_rows(workers, executor="ray"))
        for section, workers in product(SECTIONS, [(7,), MANY])
    ],
}


@pytest.mark.parametrize("first", [-1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", PICTURES)
def test_no_text_overlaps_another(check_text, kind, first):
    for draw in PICTURES[kind][first:]:
        check_text(draw())
        plt.close("all")
