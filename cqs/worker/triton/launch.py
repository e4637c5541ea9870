"""Partial outputs and gradients of block rows, in one kernel launch for each pair of steps."""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn.functional import pad
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from cqs.partial import Partial, merge_rows
from cqs.problem import Dropout, DropoutBits
from cqs.worker.cuda_graphs import cached_on_device
from cqs.worker.operands import with_positive_scale
from cqs.worker.triton.backward import key_gradients, query_gradients, row_statistics
from cqs.worker.triton.forward import attend_tiles
from cqs.worker.triton.hopper_backward import (
    key_gradients_on_hopper,
    query_gradients_on_hopper,
)
from cqs.worker.triton.hopper_forward import attend_tiles_on_hopper
from cqs.worker.triton.tiles import (
    TILE_ROW_START,
    TILE_ROW_STOP,
    Launch,
    Steps,
    key_launches,
    make_tile_list,
    query_launches,
)
from cqs.worker.work import Work

_STATISTICS_ROWS = 32
"""Rows of a program of ``row_statistics``."""
_MIN_BLOCKS_TO_WAIT = 768
"""Blocks of keys of a tile from which programs wait for each other: 98,304 keys.

The L2 cache of an H200 has 50 MB. With fewer keys those of a head stay there anyway: 639 TFLOP/s at
64K tokens without waiting. With more, waiting takes 589 to 640 TFLOP/s at 128K tokens and 552 to
635 at 512K (forward, non-causal, bfloat16, heads of 128)."""
_POLLS_PER_BLOCK = 1 / 8
"""Maximum number of polls of a program for each block of its tile.

At 128K tokens on one H200, a quarter of this rate gives 629 TFLOP/s instead of 640, and a sixteenth
615."""


def attend_block_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    work: Work,
    *,
    scale: float,
    is_united: bool = False,
    dtype: torch.dtype | None = None,
    into: Partial | None = None,
    dropout: Dropout | None = None,
    dropout_bits: DropoutBits | None = None,
) -> Partial:
    """Compute the partial outputs of all block rows, in one launch for each pair of steps.

    Args:
        query: ``[batch, num_heads, rows_q, head_dim]``, float16, bfloat16 or float32.
        key: ``[batch, num_kv_heads, rows_kv, head_dim]``, in the dtype of ``query``.
        value: ``[batch, num_kv_heads, rows_kv, value_dim]``, in the dtype of ``query``.
        work: The block rows, in row numbers of the tensors.
        scale: Factor on the scores.
        is_united: Whether to return one partial output for each row of ``query``, over its live
            pairs in all block rows. Otherwise every block row has its own, one after another.
        dtype: Dtype of the output; ``None`` means that of the query.
        into: Tensors with a last stride of 1 to write to; ``None`` means new ones.
        dropout: Dropout of the attention probabilities, or None.
        dropout_bits: Random bits of the tensors' rows; required with ``dropout``.

    Returns:
        Output ``[batch, num_heads, rows, value_dim]`` and float32 LSE ``[batch, num_heads, rows]``;
        ``into`` if that is given. Rows without a live pair have output 0 and LSE -inf.
    """
    query, scale = with_positive_scale(query, scale)
    batch, num_heads, num_rows, head_dim = query.shape
    value_dim = value.shape[-1]
    on_hopper = _is_for_hopper(query, value) and dropout is None
    descriptor = GluonDescriptor if on_hopper else TensorDescriptor
    if on_hopper:
        tile_q, tile_k = 128, 128  # 64 rows for each consumer
    else:
        tile_q, tile_k, num_warps, num_stages = _choose_tiles(query.dtype, max(head_dim, value_dim))
    if not is_united:
        num_rows = sum(len(block_row.queries) for block_row in work.block_rows)
    group_size = num_heads // key.shape[1]
    scale_log2 = scale / math.log(2)

    def new(dtype: torch.dtype | None) -> Partial:
        output = query.new_empty((batch, num_heads, num_rows, value_dim), dtype=dtype)
        return Partial(output, output.new_empty(output.shape[:3], dtype=torch.float32))

    def launch(lists: _Lists, answer: Partial) -> Partial:
        output, lse = answer
        if lists.num_rows < num_rows:  # rows without a live pair have no tile
            output.zero_(), lse.fill_(-torch.inf)
        num_items = len(lists.tiles) * batch * num_heads
        query_step, key_step = lists.steps
        rows_q = tile_q // 2 if on_hopper else tile_q
        tensors = (
            _describe(query, query_step, rows_q, descriptor),
            _describe(key, key_step, tile_k, descriptor),
            _describe(value, key_step, tile_k, descriptor),
            output,
            lse,
            lists.tiles,
            lists.runs,
        )
        strides = output.stride()[:3], *lse.stride()
        sizes = query_step, key_step, scale_log2, value_dim
        if on_hopper:
            grid = _persistent(num_items, query.device)
            attend_tiles_on_hopper[grid](
                *tensors,
                lists.mask_bits,
                _counter(query),
                len(lists.tiles),
                lists.num_long(batch * num_heads, *grid),
                num_items,
                lists.num_polls,
                num_heads,
                *strides,
                *sizes,
                GROUP_SIZE=group_size,
                # 176 and 160 KiB of shared memory: a program on Hopper can have 227.
                STAGES=2 if head_dim > 64 else 4,
                HAS_BITS=lists.has_bits,
                num_warps=4,
            )
        else:
            attend_tiles[(num_items,)](
                *tensors,
                lists.mask_bits if lists.has_bits else None,
                dropout_bits,
                len(lists.tiles),
                num_heads,
                query.shape[2],
                *strides,
                *sizes,
                GROUP_SIZE=group_size,
                TILE_Q=tile_q,
                TILE_K=tile_k,
                num_warps=num_warps,
                num_stages=num_stages,
                **_plain_options(query, value, dropout),
            )
        return answer

    all_lists = _query_lists(query.device, work, tile_q, tile_k, packed=not is_united)
    answer = into or new(dtype)
    if len(all_lists) == 1:
        return launch(all_lists[0], answer)
    # Launches of different steps have disjoint pairs of the same rows.
    parts = [(launch(lists, new(torch.float32)), slice(None)) for lists in all_lists]
    merge_rows(answer, parts)
    return answer


def gradients_of_block_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    work: Work,
    *,
    scale: float,
    dtype: torch.dtype | None = None,
    dropout: Dropout | None = None,
    dropout_bits: DropoutBits | None = None,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Compute the gradients of all block rows' live pairs.

    There are two launches for each pair of steps: one for queries, one for keys and values.

    Args:
        query: ``[batch, num_heads, rows_q, head_dim]``, float16, bfloat16 or float32.
        key: ``[batch, num_kv_heads, rows_kv, head_dim]``, in the dtype of ``query``.
        value: ``[batch, num_kv_heads, rows_kv, value_dim]``, in the dtype of ``query``.
        grad_output: Gradient of the output, ``[batch, num_heads, rows_q, value_dim]``.
        output: Output of the whole problem, ``[batch, num_heads, rows_q, value_dim]``.
        lse: LSE of the whole problem, float32 ``[batch, num_heads, rows_q]``.
        work: The block rows, in row numbers of the tensors.
        scale: Factor on the scores.
        dtype: Dtype of the gradients; ``None`` means float32.
        dropout: Dropout of the attention probabilities, or None.
        dropout_bits: Random bits of the tensors' rows; required with ``dropout``.
        into: float32 sums that are added to: that of the queries alone, or those of keys and
            values. The other gradients are not computed. ``None`` means new tensors.

    Returns:
        Gradients of query, key and value in their shapes; ``into`` if that is given.
    """
    batch, num_heads, num_queries, head_dim = query.shape
    _, num_kv_heads, num_keys, value_dim = value.shape
    statistics = _row_statistics(grad_output, output, lse)
    on_hopper = _is_for_hopper(query, value) and dropout is None
    descriptor = GluonDescriptor if on_hopper else TensorDescriptor
    if on_hopper:
        tile, block = 128, 64  # with 64 rows a block, three stages fit shared memory
    else:
        tile, block, num_warps, num_stages = _choose_gradient_tiles(
            query.dtype, max(head_dim, value_dim)
        )

    def compute(
        kernel_on_hopper: Any,
        plain_kernel: Any,
        all_lists: list[_Lists],
        likes: tuple[Tensor, ...],
        sizes: tuple[int | float, ...],
    ) -> Sequence[Tensor]:
        """Compute the gradients of ``likes``: the query, or the key and the value.

        Args:
            kernel_on_hopper: Kernel for Hopper GPUs.
            plain_kernel: Kernel for all other GPUs and dtypes.
            all_lists: The launches, whose tiles are rows of ``likes``.
            likes: The tensors whose gradients are computed.
            sizes: The kernels' arguments from ``num_heads`` to ``scale``.
        """
        num_tile_heads, num_rows = likes[0].shape[1:3]
        # Several launches add up, which is done in float32.
        of_targets = dtype or torch.float32 if len(all_lists) == 1 else torch.float32
        targets = into or [like.new_empty(like.shape, dtype=of_targets) for like in likes]
        if into is None and (not all_lists or all_lists[0].num_rows < num_rows):
            for target in targets:
                target.zero_()
        for i, lists in enumerate(all_lists):
            tiles_are_keys = len(likes) == 2
            query_step, key_step = lists.steps[::-1] if tiles_are_keys else lists.steps
            rows_q, rows_k = (block, tile) if tiles_are_keys else (tile, block)
            if on_hopper:
                rows_q = rows_k = 64  # tiles come in halves
            tensors = (
                _describe(query, query_step, rows_q, descriptor),
                _describe(key, key_step, rows_k, descriptor),
                _describe(value, key_step, rows_k, descriptor),
                _describe(grad_output, query_step, rows_q, descriptor),
                *statistics,
                *targets,
                lists.tiles,
                lists.runs,
            )
            num_items = len(lists.tiles) * batch * num_tile_heads
            options = {"GROUP_SIZE": num_heads // num_kv_heads, "IS_SUM": into is not None or i > 0}
            if on_hopper:
                grid = _persistent(num_items, query.device)
                kernel_on_hopper[grid](
                    *tensors,
                    lists.mask_bits,
                    _counter(query),
                    len(lists.tiles),
                    lists.num_long(batch * num_tile_heads, *grid),
                    num_items,
                    *lists.steps,
                    *sizes,
                    scale / math.log(2),
                    STAGES=3,
                    HAS_BITS=lists.has_bits,
                    num_warps=4,
                    **options,
                )
            else:
                plain_kernel[(num_items,)](
                    *tensors,
                    lists.mask_bits if lists.has_bits else None,
                    dropout_bits,
                    len(lists.tiles),
                    *lists.steps,
                    *sizes,
                    TILE_Q=rows_q,
                    TILE_K=rows_k,
                    num_warps=num_warps,
                    num_stages=num_stages,
                    **options,
                    **_plain_options(query, value, dropout),
                )
        return into or [target.to(dtype or torch.float32) for target in targets]

    gradients: list[Tensor] = []
    if into is None or len(into) == 1:
        gradients += compute(
            query_gradients_on_hopper,
            query_gradients,
            _query_lists(query.device, work, tile, block),
            (query,),
            (num_heads, num_queries, head_dim, scale),
        )
    if into is None or len(into) == 2:
        gradients += compute(
            key_gradients_on_hopper,
            key_gradients,
            _key_lists(query.device, work, tile, block),
            (key, value),
            (num_heads, num_queries, num_keys, head_dim, value_dim, scale),
        )
    return gradients


def _row_statistics(grad_output: Tensor, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``lse_log2`` and ``delta`` of ``row_statistics``, float32 in the shape of ``lse``."""
    batch, num_heads, num_rows, value_dim = output.shape
    lse_log2, delta = (lse.new_empty(lse.shape) for _ in range(2))
    num_blocks = triton.cdiv(num_rows, _STATISTICS_ROWS)
    row_statistics[(num_blocks * batch * num_heads,)](
        output,
        grad_output,
        lse.contiguous(),
        lse_log2,
        delta,
        output.stride(),
        grad_output.stride(),
        num_blocks,
        num_heads,
        num_rows,
        value_dim,
        BLOCK_ROWS=_STATISTICS_ROWS,
        BLOCK_V=triton.next_power_of_2(value_dim),
    )
    return lse_log2, delta


def _plain_options(query: Tensor, value: Tensor, dropout: Dropout | None) -> dict[str, Any]:
    """Return the arguments for block sizes, precision and dropout that all plain kernels share."""
    return {
        "drop_below": 0 if dropout is None else dropout.threshold,
        "keep_scale": 1.0 if dropout is None else dropout.scale,
        "BLOCK_D": triton.next_power_of_2(query.shape[-1]),
        "BLOCK_V": triton.next_power_of_2(value.shape[-1]),
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "ieee",
    }


def _persistent(num_items: int, device: torch.device) -> tuple[int]:
    """Return a grid of one program for each multiprocessor, or for each item if they are fewer."""
    return (min(num_items, _properties(device).multi_processor_count),)


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def _counter(like: Tensor) -> Tensor:
    """Allocate the counters of items taken and of items started, int32 ``[2]``, zeros."""
    return torch.zeros(2, dtype=torch.int32, device=like.device)


def _choose_gradient_tiles(dtype: torch.dtype, dim: int) -> tuple[int, int, int, int]:
    """Return rows of a tile, columns of a block, warps and stages of the plain backward kernels."""
    # Larger dims and float32 have smaller tiles, because tiles and blocks must fit shared memory.
    if dtype == torch.float32:
        return (64, 32, 4, 1) if dim <= 128 else (32, 32, 4, 1)
    return (128, 64, 8, 2) if dim <= 128 else (64, 64, 8, 1)


def _is_for_hopper(query: Tensor, value: Tensor) -> bool:
    # wgmma takes half precision from shared memory; beyond 128 columns the buffers would not fit.
    return (
        query.is_cuda
        and _properties(query.device).major == 9
        and query.dtype != torch.float32
        and query.shape[-1] <= 128
        and value.shape[-1] <= 128
    )


def _choose_tiles(dtype: torch.dtype, dim: int) -> tuple[int, int, int, int]:
    """Return rows of a tile, columns of a block, warps and stages of the plain forward kernel."""
    if dtype == torch.float32:
        return (64, 64, 4, 2) if dim <= 128 else (64, 32, 4, 2)
    return (128, 128, 8, 2) if dim <= 128 else (128, 64, 8, 2)


class _Lists(NamedTuple):
    """Tiles and runs of a launch, on the device."""

    steps: Steps
    tiles: Tensor
    runs: Tensor
    mask_bits: Tensor
    has_bits: bool
    num_rows: int
    """Number of rows of all tiles."""
    blocks: np.ndarray
    """int64 ``[num_tiles]``: number of blocks that each tile visits, descending."""

    def num_long(self, num_heads: int, num_programs: int) -> int:
        """Return the number of tiles with more than a quarter of the blocks of one program.

        Args:
            num_heads: Number of heads of all batch elements; each has all tiles.
            num_programs: Number of programs, which share the blocks of all heads.
        """
        limit = int(self.blocks.sum()) * num_heads // (4 * num_programs)
        return int(np.searchsorted(-self.blocks, -limit))

    @property
    def num_polls(self) -> int:
        """Return the maximum number of polls of ``wait_for_programs``; 0 if programs do not wait.

        Programs wait only if their tiles visit nearly equal numbers of blocks. Otherwise they would
        not read the same keys at the same time, even if they start together.
        """
        if not len(self.blocks) or self.blocks[0] < _MIN_BLOCKS_TO_WAIT:
            return 0
        longest, shortest = int(self.blocks[0]), int(self.blocks[-1])
        return int(_POLLS_PER_BLOCK * longest) if longest - shortest <= longest // 64 else 0


@cached_on_device
def _query_lists(
    device: torch.device, work: Work, tile_rows: int, block: int, *, packed: bool = False
) -> list[_Lists]:
    """Return the launches whose tiles are of queries; see ``query_launches`` in tiles.py."""
    return _make_lists(device, query_launches(work, packed=packed), tile_rows, block)


@cached_on_device
def _key_lists(device: torch.device, work: Work, tile_rows: int, block: int) -> list[_Lists]:
    """Return the launches whose tiles are of keys; see ``key_launches`` in tiles.py."""
    return _make_lists(device, key_launches(work), tile_rows, block)


def _make_lists(
    device: torch.device, launches: list[Launch], tile_rows: int, block: int
) -> list[_Lists]:
    lists = []
    for launch in launches:
        found = make_tile_list(launch, tile_rows, block)
        num_rows = int((found.tiles[:, TILE_ROW_STOP] - found.tiles[:, TILE_ROW_START]).sum())
        has_bits = len(launch.mask_bits) > 0
        mask_bits = launch.mask_bits if has_bits else np.zeros(1, np.int32)  # a kernel argument
        arrays = found.tiles, found.runs, mask_bits
        tiles, runs, bits = (torch.from_numpy(each).to(device) for each in arrays)
        lists.append(_Lists(launch.steps, tiles, runs, bits, has_bits, num_rows, found.blocks))
    return lists


def _describe(tensor: Tensor, step: int, rows: int, descriptor: type = TensorDescriptor) -> Any:
    """Describe a tensor for TMA as ``[batch, heads, step, rows / step, dim]``.

    The third dimension is the residue: a block is ``rows`` tokens of one head, ``step`` apart.

    Args:
        tensor: ``[batch, heads, rows, dim]``; copied if TMA cannot read it.
        step: Tokens between two rows of a block.
        rows: Number of rows of a block.
        descriptor: Descriptor class of Triton or of Gluon.
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
    of_batch, of_head, of_row, _ = tensor.stride()
    shape = [batch, num_heads, step, num_rows // step, dim]
    strides = [of_batch, of_head, of_row, of_row * step, 1]
    # Strides of dimensions of size 1 are never used, but are checked too.
    strides[:4] = [s if n > 1 else align for n, s in zip(shape, strides[:4], strict=False)]
    block = [1, 1, 1, rows, triton.next_power_of_2(dim)]
    if descriptor is TensorDescriptor:
        return TensorDescriptor(tensor, shape, strides, block)
    layout = _shared_layout(tuple(block), tensor.dtype)
    return GluonDescriptor(tensor, shape, strides, block, layout)


@lru_cache(maxsize=64)
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the layout of a block in shared memory, with the swizzling that wgmma reads."""
    of_element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), of_element)
