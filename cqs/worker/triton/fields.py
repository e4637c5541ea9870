"""The fields of tile and run records as constants that kernels can read.

A kernel may use a global only if it is a ``constexpr``. tiles.py builds the records and must not
import Triton, because the prediction of memory runs without it.
"""

import triton.language as tl

from cqs.worker.triton import tiles


def _constant(name: str) -> tl.constexpr:
    """Return a constant of tiles.py, such as ``TILE_ROW_START``."""
    return tl.constexpr(getattr(tiles, name))


# A variable, because mypy does not resolve the type that a module's function returns.
__getattr__ = _constant
