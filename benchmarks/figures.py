"""Draw the figures that pages show, from the rows in ``benchmarks/results``."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.explorer import write_script
from benchmarks.plots.gallery import plot_gallery
from benchmarks.plots.hero import plot_hero
from benchmarks.plots.networks import plot_networks
from benchmarks.plots.speedups import plot_gains
from benchmarks.result_tables import rows_of
from cqs.plotting.figures import save_figure

ROOT = Path(__file__).parents[1]
EXPLORER_DATA = "docs/_static/explorer-data.js"
"""Script with the data of the interactive page, in the repository."""
_DPI = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(options: argparse.Namespace) -> None:
    """Write all figures; print their paths."""
    for path, draw in FIGURES.items():
        save_figure(draw(), ROOT / path, dpi=_DPI)
        print(path)
    (ROOT / EXPLORER_DATA).write_text(write_script())
    print(EXPLORER_DATA)


FIGURES: dict[str, Callable[[], Any]] = {
    "docs/hero.png": plot_hero,
    "docs/networks.png": lambda: plot_networks(rows_of("networks-cpu")),
    "docs/patterns-by-length.png": lambda: (
        plot_gains(
            {"two CPU cores": rows_of("patterns-cpu"), "one H200": rows_of("patterns-h200")}
        ).figure
    ),
    "docs/patterns-gallery.png": plot_gallery,
}
"""The figures by path, in the repository."""
