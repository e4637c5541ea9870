"""Descriptions of tensors for the TMA unit of Hopper GPUs."""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor


def describe(
    tensor: Tensor, step: int, rows: int, *, on_hopper: bool, columns: int | None = None
) -> Any:
    """Describe a tensor for TMA as ``[batch, heads, step, rows / step, dim]``.

    The third dimension is the residue: a block is ``rows`` tokens of one head, ``step`` apart.

    Args:
        tensor: ``[batch, heads, rows, dim]``; copied if TMA cannot read it.
        step: Tokens between two rows of a block.
        rows: Number of rows of a block.
        on_hopper: Whether Gluon reads the description instead of Triton.
        columns: Number of columns of a block; ``None`` means dim, rounded up to a power of two.
    """
    if tensor.shape[2] % step:  # every residue must have as many rows
        tensor = pad(tensor, (0, 0, 0, -tensor.shape[2] % step))
    # TMA requires addresses and strides that 16 bytes divide, and a last stride of 1.
    align = 16 // tensor.element_size()
    outer = [s for n, s in zip(tensor.shape[:3], tensor.stride(), strict=False) if n > 1]
    if (
        tensor.stride(3) != 1
        or any(stride % align or stride <= 0 for stride in outer)
        or tensor.data_ptr() % 16
    ):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    batch, num_heads, num_rows, dim = tensor.shape
    batch_stride, head_stride, row_stride, _ = tensor.stride()
    shape = [batch, num_heads, step, num_rows // step, dim]
    strides = [batch_stride, head_stride, row_stride, row_stride * step, 1]
    # Strides of dimensions of size 1 are never used, but are checked too.
    strides[:4] = [s if n > 1 else align for n, s in zip(shape, strides[:4], strict=False)]
    block = [1, 1, 1, rows, columns or triton.next_power_of_2(dim)]
    if not on_hopper:
        return TensorDescriptor(tensor, shape, strides, block)
    layout = _shared_layout(tuple(block), tensor.dtype)
    return GluonDescriptor(tensor, shape, strides, block, layout)


@lru_cache(maxsize=64)
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the layout of a block in shared memory, with the swizzling that wgmma reads."""
    element_type = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), element_type)
