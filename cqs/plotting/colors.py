"""Colours of tasks, which readers with colour vision deficiency can distinguish."""

from importlib.resources import files
from itertools import cycle, islice

_PALETTE = (files("cqs.plotting") / "palette.txt").read_text().split()
"""RGB colours, each the furthest from all colours before it, among 24 levels per channel.

The distance is that of CAM02-UCS (Luo, Cui and Li, 2006). It is the smallest of four: with normal
vision, protanopia, deuteranopia and tritanopia (Machado, Oliveira and Fernandes, 2009). Lightness
J' is from 30 to 88, which reserves black and white for lines and background. Chroma is below 36.
"""


OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colour-blind safe colours of curves and bars (Okabe and Ito, "Color Universal Design", 2008)."""


def task_colors(num_tasks: int) -> list[str]:
    """Return a colour such as ``"#0b9f3c"`` for each task; colours repeat after 128 tasks."""
    return [f"#{color}" for color in islice(cycle(_PALETTE), num_tasks)]


def letter_color(color: str) -> str:
    """Return black or white, whichever has more contrast on ``color``.

    Contrast is defined by relative luminance (Web Content Accessibility Guidelines 2.1).
    """
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"
