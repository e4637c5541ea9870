"""The fields of tile, run and visit records as constants that kernels can read.

A kernel may use a global only if it is a ``constexpr``. tiles.py and visits.py build the records
and must not import Triton, because the prediction of memory runs without it.
"""

import triton.language as tl

from cqs.worker.triton import tiles, visits


def _constant(name: str) -> tl.constexpr:
    """Return a constant of tiles.py or visits.py, such as ``TILE_ROW_START``."""
    return tl.constexpr(getattr(visits if name.startswith("VISIT") else tiles, name))


# A variable, because mypy does not resolve the type that a module's function returns.
__getattr__ = _constant
