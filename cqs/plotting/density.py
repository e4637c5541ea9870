"""Plot of the live pairs of a pattern over the score matrix."""

from textwrap import fill
from typing import TYPE_CHECKING, Any

from cqs.plotting.figures import label_tokens, new_axes, points_across

if TYPE_CHECKING:
    from cqs.patterns import Pattern

_EXACT = 512
"""Longest sequence that is drawn pair by pair."""
_TILES = 96
"""Number of tiles per axis in which longer sequences are drawn."""
_TITLE_POINTS = 10


def plot_density(
    pattern: "Pattern", seqlen_q: int, seqlen_kv: int | None = None, axes: Any = None
) -> Any:
    """Plot the live pairs of a pattern; long sequences as the fraction of live pairs per tile.

    The scale of fractions is logarithmic, so that a single live pair of a tile is visible. Tiles
    without live pairs are white.

    Args:
        pattern: A pattern that is the same for all heads.
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys; ``None`` means ``seqlen_q``.
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
