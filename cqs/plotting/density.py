"""The share of pairs that a pattern lets attend, over the score matrix."""

from textwrap import fill
from typing import TYPE_CHECKING, Any

from cqs.plotting.figures import label_tokens, new_axes, points_across

if TYPE_CHECKING:
    from cqs.patterns import Pattern

_EXACT = 512
"""Sequences of up to so many tokens are drawn pair by pair."""
_TILES = 96
"""Longer ones in so many tiles each way, by their share of pairs that attend."""
_TITLE_POINTS = 10


def plot_density(
    pattern: "Pattern", seqlen_q: int, seqlen_kv: int | None = None, axes: Any = None
) -> Any:
    """Draw a pattern: every pair where sequences are short, else the share of pairs that attend.

    The scale of shares is logarithmic, so that a single live pair of a tile shows; tiles without
    any are white.

    Args:
        pattern: Of one head.
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys; ``None``: as many.
        axes: Matplotlib axes to draw on; ``None`` makes a new figure.

    Returns:
        The matplotlib axes.
    """
    import numpy as np

    seqlen_kv = seqlen_q if seqlen_kv is None else seqlen_kv
    bound = pattern.bind(seqlen_q, seqlen_kv)
    axes = new_axes((6, 5)) if axes is None else axes
    if max(seqlen_q, seqlen_kv) <= _EXACT:
        shares = bound.to_mask().astype(float)
    else:
        rows, columns = (_cut(length) for length in (seqlen_q, seqlen_kv))
        shares = np.array(
            [[bound.count(q, k) / max(len(q) * len(k), 1) for k in columns] for q in rows]
        )
    least = shares.min(where=shares > 0, initial=0.1)
    image = axes.imshow(
        shares.reshape(len(shares), -1) if shares.size else np.zeros((1, 1)),
        cmap="viridis_r",
        norm="log",
        clim=(least, 1),
        interpolation="nearest",
        extent=(0, max(seqlen_kv, 1), max(seqlen_q, 1), 0),
    )
    if ((shares > 0) & (shares < 1)).any():
        axes.figure.colorbar(
            image,
            ax=axes,
            aspect=30,
            label="share of pairs",
            format=lambda share, _: f"{100 * share:g} %",
        )
    letters = max(int(points_across(axes)[0] / (0.6 * _TITLE_POINTS)) - len(", 100 %"), 24)
    title = f"{fill(repr(pattern), letters)}, {100 * bound.density:.3g} %"
    axes.set_title(title, fontsize=_TITLE_POINTS, pad=8)
    label_tokens(axes, seqlen_q, seqlen_kv)
    return axes


def _cut(length: int) -> list[range]:
    """Cut a sequence into tiles whose lengths differ by at most one; fewer if it is short."""
    tiles = max(min(_TILES, length), 1)
    return [range(length * i // tiles, length * (i + 1) // tiles) for i in range(tiles)]
