"""Figures to draw on, and files to draw into."""

import os
from pathlib import Path
from typing import Any


def new_axes(size: tuple[float, float]) -> Any:
    """Return the axes of a new figure of pyplot, ``size`` inches wide and high."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=size, layout="constrained")[1]


def check_picture(path: str | Path) -> None:
    """Raise what :func:`save_owners` would raise for ``path``, before there is a plan to draw."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise NotImplementedError(
            f"pictures need matplotlib: pip install 'cqs[plots]' ({error})"
        ) from error
    path = Path(path)
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(f"a picture's name must end in one of {sorted(formats)}, got '{path}'")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"cannot write a picture to '{path}'")
