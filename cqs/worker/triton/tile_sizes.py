"""Which kernels compute a call, and the sizes of their tiles."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cqs.worker.operands import TaskOperands
from cqs.worker.triton.hopper_pairs import LARGEST_SOFTCAP

_MIN_ALIBI_SCALE = 2.0**-40
"""Smallest factor on the scores with which the Hopper kernels compute ALiBi."""


class Tiles(NamedTuple):
    """Sizes of the tiles of a kernel, and the options that it is compiled with."""

    on_hopper: bool
    """Whether the kernels for Hopper GPUs compute; otherwise those for all GPUs."""
    rows: int
    """Rows of a tile."""
    block: int
    """Columns of a block."""
    options: dict[str, int]


_HOPPER_BLOCKS = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
"""Keys of a block and stages of the forward kernel for Hopper GPUs, by the larger of head_dim and
value_dim, rounded up. They take 160, 176 and 224 KiB of the 227 KiB of shared memory."""
_LARGEST_HOPPER_DIMS = {False: 256, True: 128}
"""Largest head_dim and value_dim of the kernels for Hopper GPUs, by backward pass: the buffers of
larger ones would not fit shared memory."""

# By backward pass, float32, and dims up to 128, 256 or 512. Larger dims and float32 have smaller
# tiles, because tiles and blocks must fit shared memory.
_PLAIN_TILES = {
    (False, False, 128): (128, 128, 8, 2),
    (False, False, 256): (128, 64, 8, 2),
    (False, False, 512): (64, 32, 8, 1),
    (False, True, 128): (64, 64, 4, 2),
    (False, True, 256): (64, 32, 4, 2),
    (False, True, 512): (32, 16, 8, 1),
    (True, False, 128): (128, 64, 8, 2),
    (True, False, 256): (64, 64, 8, 1),
    (True, False, 512): (32, 32, 8, 1),
    (True, True, 128): (64, 32, 4, 1),
    (True, True, 256): (32, 32, 4, 1),
    (True, True, 512): (16, 16, 8, 1),
}
"""Rows of a tile, columns of a block, warps and stages of the plain kernels."""
_SMALL_TILES = _PLAIN_TILES | {
    (False, False, 128): (64, 64, 4, 2),
    (False, False, 256): (64, 32, 4, 1),
    (False, False, 512): (32, 32, 4, 1),
    (False, True, 128): (32, 32, 4, 1),
    (False, True, 256): (32, 32, 4, 1),
    (False, True, 512): (16, 16, 4, 1),
    (True, False, 128): (64, 32, 4, 2),
    (True, False, 256): (32, 32, 4, 1),
    (True, False, 512): (16, 32, 4, 1),
    (True, True, 128): (32, 16, 4, 1),
    (True, True, 256): (16, 16, 4, 1),
}
"""The same for GPUs other than Hopper, never timed: they fit the 99 KiB of shared memory that
compute capability 8.6, 8.9 and 12.x have, and the tensor memory of 10.x."""


def choose_tiles(operands: TaskOperands, is_backward: bool) -> Tiles:
    """Return the kernels and the sizes of their tiles for tensors and options."""
    query = operands.query
    width = max(triton.next_power_of_2(max(query.shape[-1], operands.value.shape[-1])), 64)
    largest = _LARGEST_HOPPER_DIMS[is_backward]
    if width <= largest and is_for_hopper(query) and _hopper_kernels_support(operands):
        if is_backward:
            return Tiles(True, 128, 64, {"STAGES": 3})  # with blocks of 64, 3 stages fit
        block, num_stages = _HOPPER_BLOCKS[width]
        return Tiles(True, 128, block, {"CONSUMERS": 2, "STAGES": num_stages})
    width = max(width, 128)
    table = _PLAIN_TILES if is_tuned_for(query) else _SMALL_TILES
    rows, block, num_warps, num_stages = table[is_backward, query.dtype == torch.float32, width]
    return Tiles(False, rows, block, {"num_warps": num_warps, "num_stages": num_stages})


def one_per_processor(num_items: int, device: torch.device) -> tuple[int]:
    """Return a grid of one program for each multiprocessor, or for each item if they are fewer."""
    return (min(num_items, num_processors(device)),)


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return int(_properties(device).multi_processor_count)


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def is_tuned_for(query: Tensor) -> bool:
    """Return whether the tiles were timed on such a device; on a CPU the interpreter runs."""
    return not query.is_cuda or _properties(query.device).major == 9


def is_for_hopper(query: Tensor) -> bool:
    """Return whether kernels for Hopper GPUs compute such tensors, if they support all else."""
    # wgmma takes half precision from shared memory.
    is_half = query.dtype != torch.float32
    return query.is_cuda and is_half and _properties(query.device).major == 9


def _hopper_kernels_support(operands: TaskOperands) -> bool:
    """Return whether the Hopper kernels support the options; otherwise the plain kernels do."""
    terms = operands.terms  # with the bias of these rows; ``terms.terms`` are those of the problem
    if operands.dropout is not None or (terms is not None and terms.bias is not None):
        return False
    if terms is None:
        return True
    # The slopes of ALiBi are divided by the scale.
    is_scaled = terms.terms.alibi_slopes is None or abs(operands.scale) >= _MIN_ALIBI_SCALE
    return is_scaled and terms.terms.softcap <= LARGEST_SOFTCAP
