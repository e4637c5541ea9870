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


def draw_small_panels(length):
    figure, panels = plt.subplots(2, 3, figsize=(12, 8), layout="compressed")
    for panel, num_tasks in zip(panels.flat, (3, 7, 13, 31, 111), strict=False):
        plot_owners(make_plan(length, num_tasks=num_tasks), panel)
    return plot_density(longformer(512, 64), length, axes=panels.flat[-1])


FAILURE = 1, "node 0", 0.7, (0, 1)
MIXED = strided(512) | sliding_window(1000, 1000)
SECTIONS = {name: each for name, each in vars(sections).items() if isinstance(each, Section)}
PICTURES = {
    "few owners": lambda: plot_owners(make_plan(10, num_tasks=3)),
    "owners": lambda: plot_owners(make_plan(10**6, num_tasks=111, pattern=longformer(512, 64))),
    "causal owners": lambda: plot_owners(make_plan(1000, 3000, num_tasks=31, is_causal=True)),
    "small panels": lambda: draw_small_panels(10),
    "panels": lambda: draw_small_panels(10**6),
    "density": lambda: plot_density(MIXED, 10**6),
    "short timeline": lambda: plot_timeline(make_report(3, 2, [FAILURE])),
    "timeline": lambda: plot_timeline(make_report(111, 111, [FAILURE])),
} | {
    f"{name}, {len(workers)} rows": partial(section.plot, make_rows(workers, "ray"))
    for (name, section), workers in product(SECTIONS.items(), [(7,), MANY])
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_no_text_overlaps_another(monkeypatch, draw):
    figure, draw_text, drawn = draw().figure, Text.draw, {}

    def note(text, renderer):
        draw_text(text, renderer)
        if text.get_visible() and text.get_text().strip():
            drawn[text] = text.get_window_extent()

    monkeypatch.setattr(Text, "draw", note)
    figure.canvas.draw()
    assert drawn
    width, height = figure.canvas.get_width_height()
    for text, box in drawn.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for (text, box), (other, other_box) in combinations(drawn.items(), 2):
        assert not box.padded(-1).overlaps(other_box), (text, other)
