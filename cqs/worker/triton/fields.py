"""The fields of tile and run records as constants that kernels can read.

A kernel may use a global only if it is a ``constexpr``. tiles.py builds the records and must not
import Triton, because the prediction of memory runs without it.
"""

import triton.language as tl

from cqs.worker.triton import tiles

TILE_ROW_START = tl.constexpr(tiles.TILE_ROW_START)
TILE_ROW_STOP = tl.constexpr(tiles.TILE_ROW_STOP)
TILE_OUTPUT_ROW = tl.constexpr(tiles.TILE_OUTPUT_ROW)
TILE_RUN_START = tl.constexpr(tiles.TILE_RUN_START)
TILE_BANDED_STOP = tl.constexpr(tiles.TILE_BANDED_STOP)
TILE_RUN_STOP = tl.constexpr(tiles.TILE_RUN_STOP)
TILE_FULL_BLOCKS = tl.constexpr(tiles.TILE_FULL_BLOCKS)
TILE_RESIDUE = tl.constexpr(tiles.TILE_RESIDUE)
TILE_FIELDS = tl.constexpr(tiles.TILE_FIELDS)

RUN_COLUMN_START = tl.constexpr(tiles.RUN_COLUMN_START)
RUN_COLUMN_STOP = tl.constexpr(tiles.RUN_COLUMN_STOP)
RUN_LOW = tl.constexpr(tiles.RUN_LOW)
RUN_HIGH = tl.constexpr(tiles.RUN_HIGH)
RUN_BITS_START = tl.constexpr(tiles.RUN_BITS_START)
RUN_RESIDUE = tl.constexpr(tiles.RUN_RESIDUE)
RUN_FIELDS = tl.constexpr(tiles.RUN_FIELDS)

NO_BITS = tl.constexpr(tiles.NO_BITS)
