"""Pictures of patterns."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cqs.patterns.pattern import Pattern

_EXACT = 512
"""Sequences of up to so many tokens are drawn pair by pair."""
_TILES = 96
"""Longer ones in so many tiles each way, by their share of pairs that attend."""


def draw(pattern: "Pattern", seqlen_q: int, seqlen_kv: int, axes: Any = None) -> Any:
    """Draw a pattern of one head; see :meth:`Pattern.draw`."""
    bound = pattern.bind(seqlen_q, seqlen_kv)
    if axes is None:
        from matplotlib.figure import Figure

        axes = Figure(figsize=(5, 5), layout="constrained").add_subplot()
    if max(seqlen_q, seqlen_kv) <= _EXACT:
        shares = bound.to_mask().astype(float)
    else:
        rows, columns = (_cut(length) for length in (seqlen_q, seqlen_kv))
        shares = np.array(
            [[bound.count(q, k) / max(len(q) * len(k), 1) for k in columns] for q in rows]
        )
    axes.imshow(
        shares.reshape(len(shares), -1) if shares.size else np.zeros((1, 1)),
        cmap="Blues",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        aspect="equal" if seqlen_q == seqlen_kv else "auto",
        extent=(0, max(seqlen_kv, 1), max(seqlen_q, 1), 0),
    )
    axes.set(xlabel="key", ylabel="query", title=f"{pattern!r}, {100 * bound.density:.3g} %")
    return axes


def _cut(length: int) -> list[range]:
    """Cut a sequence into tiles whose lengths differ by at most one; fewer if it is short."""
    tiles = max(min(_TILES, length), 1)
    return [range(length * i // tiles, length * (i + 1) // tiles) for i in range(tiles)]
