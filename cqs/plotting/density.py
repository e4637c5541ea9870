"""Plot of the live pairs of a pattern over the score matrix."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from cqs.plotting.figures import label_tokens, new_axes, points_across

if TYPE_CHECKING:
    from cqs.patterns import BoundPattern, Pattern

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
        rows, columns = (cut([range(length)], _TILES) for length in (seqlen_q, seqlen_kv))
        sizes = np.outer(np.diff(rows), np.diff(columns))
        shares = count_cells(bound, rows, columns) / np.maximum(sizes, 1)
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


def cut(groups: Sequence[range], most: int) -> list[int]:
    """Return the edges of the cells of a sequence, each within one group if there are few groups.

    Args:
        groups: Consecutive ranges of the whole sequence.
        most: Most cells of a sequence longer than twice this number; of a shorter sequence, every
            token is a cell.
    """
    length = groups[-1].stop
    if length <= 2 * most:
        return list(range(max(length, 1) + 1))
    if len(groups) > most:
        groups = [range(length)]
    parts = most // len(groups)
    starts = {group.start + len(group) * i // parts for group in groups for i in range(parts)}
    return [*sorted(starts), length]


def count_cells(bound: "BoundPattern", rows: list[int], columns: list[int]) -> Any:
    """Count the live pairs in every cell of a grid, int64 ``[len(rows) - 1, len(columns) - 1]``.

    Args:
        bound: A bound pattern.
        rows: Edges of the cells' queries, ascending.
        columns: Edges of the cells' keys, ascending.
    """
    import numpy as np

    counts = np.zeros((len(rows) - 1, len(columns) - 1), int)
    for i in np.flatnonzero(np.diff(rows)):
        in_row = range(*rows[i : i + 2])
        if bound.count(in_row, range(columns[0], columns[-1])):
            for j in np.flatnonzero(np.diff(columns)):
                counts[i, j] = bound.count(in_row, range(*columns[j : j + 2]))
    return counts
