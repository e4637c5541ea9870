"""Pictures of patterns: which pairs are live."""

from typing import Any

import numpy as np

from cqs.patterns import (
    Pattern,
    block_diagonal,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    global_tokens,
    longformer,
    sliding_window,
    strided,
)
from cqs.plotting.colors import OKABE_ITO

_TOKENS = 48


def gallery() -> dict[str, Pattern]:
    """Return patterns by the text under their picture."""
    random_blocks = np.random.default_rng(1).random((12, 12)) < 0.25
    return {
        "band: sliding_window(6, 6)": sliding_window(6, 6),
        "causal band: sliding_window(8)": sliding_window(8),
        "global: global_tokens(3)": global_tokens(3),
        "random: block_sparse(layout, 4)": block_sparse(random_blocks, 4),
        "block-local: block_diagonal(8)": block_diagonal(8),
        "dilated(4, 4, 3)": dilated(4, 4, 3),
        "strided(8)": strided(8),
        "fixed(8, 2)": fixed(8, 2),
        "longformer(8, 3)": longformer(8, 3),
        "documents([0, 10, 30, 48])": documents([0, 10, 30, 48]),
        "strided(8) - block_diagonal(8)": strided(8) - block_diagonal(8),
        "block_diagonal(12) & causal()": block_diagonal(12) & causal(),
    }


def plot_gallery() -> Any:
    """Return a figure of patterns of 48 tokens, with keys to the right and queries downwards."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    patterns = gallery()
    figure = Figure(figsize=(9.6, 7.6), layout="constrained")
    colors = ListedColormap(["#f2f2f2", OKABE_ITO[0]])
    for axes, (text, pattern) in zip(figure.subplots(3, 4).flat, patterns.items(), strict=True):
        axes.imshow(pattern.to_mask(_TOKENS), cmap=colors, vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_title(text, fontsize="small")
    return figure
