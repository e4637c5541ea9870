"""Draw the figures that pages show, from the rows in ``benchmarks/results``."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.case_measurement import CaseRow
from benchmarks.explorer import write_script
from benchmarks.plots.bottleneck import plot_bottleneck
from benchmarks.plots.case_study import plot_study
from benchmarks.plots.gallery import plot_gallery
from benchmarks.plots.hero import plot_hero
from benchmarks.plots.networks import plot_networks
from benchmarks.plots.shares import plot_shares
from benchmarks.plots.speedups import plot_gains, plot_speedups
from benchmarks.result_tables import memory_shares, rows_of
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


def _case_study() -> Any:
    """Return the figure of the published case study on an H100."""
    names = {field.name for field in fields(CaseRow)}
    rows = [{name: row[name] for name in names & row.keys()} for row in rows_of("memory-h100")]
    return plot_study([CaseRow(**row) for row in rows])


FIGURES: dict[str, Callable[[], Any]] = {
    "docs/hero.png": plot_hero,
    "docs/networks.png": lambda: plot_networks(rows_of("networks-cpu")),
    "docs/memory-shares.png": lambda: plot_shares(memory_shares()).figure,
    "docs/case-study.png": _case_study,
    "docs/patterns-by-length.png": lambda: (
        plot_gains(
            {"two CPU cores": rows_of("patterns-cpu"), "one H200": rows_of("patterns-h200")}
        ).figure
    ),
    "docs/patterns-gallery.png": plot_gallery,
    "docs/bottleneck.png": lambda: plot_bottleneck(rows_of("bottleneck-cpu")),
    "benchmarks/results/patterns-cpu.png": lambda: plot_speedups(rows_of("patterns-cpu")).figure,
    "benchmarks/results/patterns-h200.png": lambda: plot_speedups(rows_of("patterns-h200")).figure,
}
"""The figures by path, in the repository."""
