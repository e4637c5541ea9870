"""Axes, labels and image files that all plots share."""

import io
import os
from collections.abc import Sequence
from math import ceil, floor, log2
from pathlib import Path
from typing import Any

from cqs.files import replace_file

PLAIN = "{x:,.6g}"
"""Format of the numbers of a logarithmic axis, instead of powers."""


def new_axes(size: tuple[float, float]) -> Any:
    """Return the axes of a new figure of pyplot, ``size`` inches wide and high."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="compressed")[1]


def points_across(axes: Any) -> tuple[float, float]:
    """Return the approximate inner width and height of ``axes`` in points, before layout."""
    box, dots = axes.get_window_extent(), axes.figure.dpi
    return 72 * box.width / dots, 72 * box.height / dots


def label_tokens(axes: Any, seqlen_q: int, seqlen_kv: int) -> None:
    """Label the axes of a score matrix, with keys to the right and queries downwards.

    Each token is one unit. Limits and aspect are set too.
    """
    axes.set(
        xlim=(0, max(seqlen_kv, 1)),
        ylim=(max(seqlen_q, 1), 0),
        xlabel="key",
        ylabel="query",
        aspect="equal" if seqlen_q == seqlen_kv else "auto",
    )
    width, height = points_across(axes)
    _number(axes.xaxis, width / (7 * len(f"{seqlen_kv:,}")))
    _number(axes.yaxis, height / 20)


def _number(axis: Any, room: float) -> None:
    """Set the token ticks of an axis with space for ``room`` numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(max(min(int(room) - 1, 5), 1), integer=True))
    axis.set_major_formatter("{x:,.0f}")


def draw_key(axes: Any, colors: Sequence[str]) -> Any:
    """Draw a bar beside the axes that numbers the colours of tasks; return it."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.ticker import MaxNLocator

    most = min(16, int(points_across(axes)[1] / 20))
    edges = [task - 0.5 for task in range(len(colors) + 1)]
    bar = axes.figure.colorbar(
        ScalarMappable(BoundaryNorm(edges, len(colors)), ListedColormap(colors)),
        ax=axes,
        aspect=30,
        ticks=MaxNLocator(most, integer=True, steps=[1, 2, 5, 10]),
        label="task",
    )
    bar.minorticks_off()
    return bar


def make_logarithmic(axes: Any) -> None:
    """Make the vertical axis logarithmic, between powers of two; call after drawing."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(PLAIN)
    low, high = axes.dataLim.intervaly
    axes.set_ylim(0.9 * 2 ** floor(log2(low)), 1.1 * 2 ** ceil(log2(high)))


def add_legend(axes: Any, num_columns: int = 2) -> Any:
    """Add a legend above the axes if there are several labels; return the axes."""
    if len(axes.get_legend_handles_labels()[1]) > 1:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": num_columns}
        axes.legend(**place, frameon=False, fontsize="small")
    return axes


def save_figure(figure: Any, path: str | Path, *, dpi: int) -> None:
    """Write a figure to an image file, in the format of its suffix.

    Args:
        figure: A matplotlib figure.
        path: The file, which is overwritten when the picture is complete.
        dpi: Dots per inch of pixel formats.

    Raises:
        OSError: The file cannot be written.
    """
    buffer = io.BytesIO()  # some writers of matplotlib fail with errors of their own on a full disk
    figure.savefig(buffer, format=Path(path).suffix.removeprefix(".").lower(), dpi=dpi)
    with replace_file(path) as partial:
        partial.write_bytes(buffer.getvalue())


def check_picture(path: str | Path) -> None:
    """Raise the errors that writing a picture to ``path`` would raise.

    Raises:
        NotImplementedError: matplotlib is not installed.
        ValueError: The suffix of the path is not a supported format.
        OSError: The path cannot be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise NotImplementedError(
            f"pictures require matplotlib: pip install matplotlib ({error})"
        ) from error
    path = Path(path)
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(f"picture must end in one of {sorted(formats)}, got '{path}'")
    is_other = path.exists() and not path.is_file()
    places = [path.resolve().parent, *[path] * path.exists()]
    if is_other or not all(os.access(place, os.W_OK) for place in places):
        raise OSError(f"picture must be a writable path, got '{path}'")
