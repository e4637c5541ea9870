"""Colours of tasks, which readers with colour vision deficiency can distinguish."""

from itertools import cycle, islice

_PALETTE = """
    432cde ff6f16 4ee9ff 643737 908590 7a90f4 e9d3b1 594e6f a64300 bce943 c89b7a 906459 b1b1bc
    6f6fa6 7a2100 433785 9090bc 6fbcf4 bc6f43 6464f4 90d364 7a647a 6f4e59 85432c a6857a 594e9b
    bcdede c8b1a6 7ab143 a69b9b c85900 b1c821 7a59bc 85f47a 9b5937 907ac8 6f214e ff85de 6f6f6f
    f4bcc8 64de90 5916b1 bc8564 59859b 90a6bc bcc8de 6f5990 9b0043 9b216f 7a7ae9 004e59 a66f59
    9b9ba6 2c4e16 ff854e 59a616 907a7a 64bc90 64d3ff de7ad3 434ee9 b1b164 85a6ff e94390 9bd3c8
    4e8516 9064c8 b11685 7a90a6 a6de59 594ebc 9b434e 439037 7a7a85 646416 907ab1 642c6f d3c8b1
    9b0016 e99b90 4e6464 ffb185 64434e 375921 d3d30b 9b21a6 bcb1b1 21a664 de90c8 bc434e 434343
    6f8564 a6c87a c87a4e 904e37 7a2c59 64bc21 b19085 4eb1de e9c89b bc642c d3bc4e 859bb1 d3d3e9
    b17ade 4300d3 dea6d3 6f0b7a a6596f 437ad3 4e7a90 a6a6b1 7a5959 4364d3 c84385 bcbcc8 90e9d3
    005985 c8bcbc b1a6a6 c8bce9 435964 7a1659 a62164 2c5943 b164ff 6f6f43 437a64
""".split()
"""RGB colours, each the furthest from all colours before it, among 24 levels per channel.

The distance is that of CAM02-UCS (Luo, Cui and Li, 2006). It is the smallest of four: with normal
vision, protanopia, deuteranopia and tritanopia (Machado, Oliveira and Fernandes, 2009). Lightness
J' is from 30 to 88, which reserves black and white for lines and background. Chroma is below 36.
"""


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
