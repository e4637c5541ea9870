"""Sparse patterns on which methods of context parallelism are compared."""

from collections.abc import Sequence

import numpy as np

from benchmarks.packed import LENGTHS, PackedSequence
from cqs.patterns import Pattern, block_sparse, documents

DOCUMENTS = "documents:"
"""What names of patterns of packed documents begin with."""
PER_HEAD = "blocks-20"
"""Name of the pattern that differs by head, for as many KV heads as query heads."""
NAMES = (*(DOCUMENTS + name for name in LENGTHS), "window-3d", PER_HEAD)
_CUT = 16
"""Documents are cut at multiples of these tokens, so that rings of up to 8 ranks cut them."""
_MEAN_LENGTH = 1024
"""Mean tokens of documents, unless a corpus determines it."""
_TILE = 6, 8, 8
"""Frames, rows and columns of a tile of a video."""
_REACH = 1
"""Tiles that a tile sees on either side, in frames, rows and columns."""
_BLOCK, _DENSITY = 128, 0.2


def draw_pattern(name: str, tokens: int, num_heads: int) -> Pattern:
    """Return a pattern, equal on every rank.

    - ``"documents:..."``: causal documents, with lengths of ``benchmarks packed``.
    - ``"window-3d"``: tiles of 6 x 8 x 8 tokens of a video, as of Sliding Tile Attention (Zhang et
      al., arXiv 2502.04507), each of which sees itself and its neighbours in three dimensions.
    - ``"blocks-20"``: a random fifth of the blocks of 128 x 128 pairs, drawn anew for every head,
      and those of the diagonal.

    Args:
        name: One of ``NAMES``.
        tokens: Sequence length.
        num_heads: Number of query heads.

    Raises:
        ValueError: The pattern requires another number of tokens.
    """
    generator = np.random.default_rng(0)
    if name.startswith(DOCUMENTS):
        _check_multiple(name, tokens, _CUT)
        case = PackedSequence(tokens, max(tokens // _MEAN_LENGTH, 2), 1)
        ends = np.cumsum(LENGTHS[name.removeprefix(DOCUMENTS)](case, generator))
        return documents(np.unique([0, *(ends // _CUT * _CUT)]))
    if name == "window-3d":
        size = int(np.prod(_TILE))
        _check_multiple(name, tokens, size)
        return block_sparse(_window(_divide(tokens // size)), size)
    _check_multiple(name, tokens, _BLOCK)
    number = tokens // _BLOCK
    layout = generator.random((num_heads, number, number)) < _DENSITY
    return block_sparse(layout | np.eye(number, dtype=bool), _BLOCK)


def _check_multiple(name: str, tokens: int, number: int) -> None:
    if tokens % number:
        raise ValueError(f"tokens must be a multiple of {number} for {name}, got {tokens}")


def _divide(number: int) -> tuple[int, ...]:
    """Return three factors of a number of tiles that are as equal as possible, ascending."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    triples = [
        (a, b, number // (a * b)) for a in divisors for b in divisors if number % (a * b) == 0
    ]
    return min((tuple(sorted(triple)) for triple in triples), key=lambda triple: triple[2])


def _window(grid: Sequence[int]) -> np.ndarray:
    """Return the live pairs of tiles in a grid, bool ``[tiles, tiles]``."""
    places = np.indices(grid).reshape(len(grid), -1)
    distances = np.abs(places[:, :, None] - places[:, None])
    return np.asarray((distances <= _REACH).all(axis=0))
