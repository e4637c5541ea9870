"""Partial outputs and gradients of block rows, in one kernel launch for each pair of steps."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from cqs.launches import Arguments, Launcher
from cqs.partial import Partial, merge_rows
from cqs.problem.scores import add_sinks
from cqs.worker.cuda_graphs import cached_on_device
from cqs.worker.operands import TaskOperands, with_positive_scale
from cqs.worker.triton.backward import key_gradients, query_gradients
from cqs.worker.triton.counters import new_counter
from cqs.worker.triton.descriptors import describe
from cqs.worker.triton.forward import attend_tiles
from cqs.worker.triton.hopper_forward import attend_tiles_on_hopper
from cqs.worker.triton.hopper_key_gradients import key_gradients_on_hopper
from cqs.worker.triton.hopper_query_gradients import query_gradients_on_hopper
from cqs.worker.triton.rectangle_launch import (
    gradients_of_rectangles,
    gradients_of_visits,
    takes_rectangle_kernel,
    takes_visits,
)
from cqs.worker.triton.residues import find_residues
from cqs.worker.triton.statistics_launch import launch_row_statistics
from cqs.worker.triton.tile_sizes import (
    Tiles,
    choose_tiles,
    num_processors,
    one_per_processor,
)
from cqs.worker.triton.tiles import (
    TILE_ROW_START,
    TILE_ROW_STOP,
    Steps,
    TileList,
    key_launches,
    make_tile_list,
    query_launches,
)
from cqs.worker.work import Work

_MIN_BLOCKS_TO_WAIT = 768
"""Blocks of keys of a tile from which programs wait for each other: 98,304 keys, and half as many
in the blocks of heads above 128, whose keys have twice the bytes.

The L2 cache of an H200 has 50 MB. With fewer keys those of a head stay there anyway: 639 TFLOP/s at
64K tokens without waiting. With more, waiting takes 589 to 640 TFLOP/s at 128K tokens and 552 to
635 at 512K (forward, non-causal, bfloat16, heads of 128)."""
_POLLS_PER_BLOCK = 1 / 8
"""Maximum number of polls of a program for each block of its tile.

At 128K tokens on one H200, a quarter of this rate gives 629 TFLOP/s instead of 640, and a sixteenth
615."""

_ROWS_OF_THREE = 192
_MIN_ITEMS_OF_THREE, _MIN_BLOCKS_OF_THREE, _MAX_ROWS_OF_THREE = 8, 80, 1.05
"""When three consumers compute heads of 64: the least number of items for each multiprocessor, the
least number of blocks for each tile, and the largest number of rows of tiles for each output row.

On one H100, three take 0.90 of the time of two with 16 heads of 64K tokens (causal 0.91), and 0.96
with 16K tokens (causal 1.00 to 1.03). Their tiles of 192 rows are fewer, which leaves more programs
idle at the end, and visit more masked pairs: 1.16 for a window of 10 % of 16K tokens."""

_BOUNDING_CAPS = 16.0, 50.0
"""Soft caps with which the Hopper kernel computes no maxima of rows.

Below, many scores are so close to the cap that the polynomial is inaccurate. Above, exponents would
be too large for sums and large values in float32."""


def attend_block_rows(
    operands: TaskOperands,
    *,
    is_united: bool = False,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
    into: Partial | None = None,
) -> Partial:
    """Compute the partial outputs of all block rows, in one launch for each pair of steps.

    Args:
        operands: Tensors and options; float16, bfloat16 or float32.
        is_united: Whether to return one partial output for each row of the query, over its live
            pairs in all block rows. Otherwise every block row has its own, one after another.
        sinks: ``[num_heads]``: one more score of each row of the result, without a value, or None.
        dtype: Dtype of the output; ``None`` means that of the query.
        into: Tensors with a last stride of 1 to write to; ``None`` means new ones.

    Returns:
        Output ``[batch, num_heads, rows, value_dim]`` and float32 LSE ``[batch, num_heads, rows]``;
        ``into`` if that is given. Rows without a live pair have output 0, and LSE -inf or the sink.
    """
    query, scale = with_positive_scale(operands.query, operands.scale)
    if query is not operands.query:
        operands = operands._replace(query=query, scale=scale)
    value, work = operands.value, operands.work
    batch, num_heads, num_rows, _ = query.shape
    value_dim = value.shape[-1]
    tiles, all_lists = _choose_forward_lists(operands, packed=not is_united)
    if not is_united:
        num_rows = sum(len(block_row.queries) for block_row in work.block_rows)

    def new(dtype: torch.dtype | None) -> Partial:
        output = query.new_empty((batch, num_heads, num_rows, value_dim), dtype=dtype)
        return Partial(output, output.new_empty(output.shape[:3], dtype=torch.float32))

    def launch(lists: _Lists, answer: Partial, sinks: Tensor | None = None) -> Partial:
        output, lse = answer
        if lists.num_rows < num_rows:  # rows without a live pair have no tile
            output.zero_(), lse.fill_(-torch.inf)
            if sinks is not None:
                lse.copy_(sinks.unsqueeze(-1))
        numbers = (
            *((lists.num_polls, num_heads) if tiles.on_hopper else (num_heads, query.shape[2])),
            output.stride()[:3],
            *lse.stride(),
            *lists.steps,
            scale / math.log(2),
            value_dim,
        )
        _launch(_FORWARD_KERNELS, operands, tiles, lists, answer, numbers, sinks=sinks)
        return answer

    answer = into or new(dtype)
    if len(all_lists) == 1:
        return launch(all_lists[0], answer, None if sinks is None else sinks.detach().contiguous())
    # Launches of different steps have disjoint pairs of the same rows.
    parts = [(launch(lists, new(torch.float32)), slice(None)) for lists in all_lists]
    merge_rows(answer, parts)
    return answer if sinks is None else add_sinks(answer, sinks)


def gradients_of_block_rows(
    operands: TaskOperands,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
    into: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Compute the gradients of all block rows' live pairs.

    There are two launches for each pair of steps: one for queries, one for keys and values. On
    Hopper GPUs large rectangles, patterns without gaps and dilated patterns of many keys take one
    launch instead, see :mod:`cqs.worker.triton.rectangle_launch`.

    Args:
        operands: Tensors and options; float16, bfloat16 or float32.
        grad_output: Gradient of the output, ``[batch, num_heads, rows_q, value_dim]``.
        output: Output of the whole problem, ``[batch, num_heads, rows_q, value_dim]``.
        lse: LSE of the whole problem, float32 ``[batch, num_heads, rows_q]``.
        dtype: Dtype of the gradients; ``None`` means float32.
        into: float32 sums that are added to: that of the queries alone, or those of keys and
            values. The other gradients are not computed. ``None`` means new tensors.

    Returns:
        Gradients of query, key and value in their shapes; ``into`` if that is given.
    """
    query, key, value, work, scale, *_ = operands
    _, num_heads, num_queries, head_dim = query.shape
    _, _, num_keys, value_dim = value.shape
    tiles = choose_tiles(operands, is_backward=True)
    if tiles.on_hopper and into is None:
        arguments = grad_output, output, lse, dtype, num_processors(query.device)
        if takes_visits(operands):
            return gradients_of_visits(operands, *arguments)
        if takes_rectangle_kernel(operands):
            return gradients_of_rectangles(operands, *arguments)
        if (residue_gradients := _gradients_of_residues(operands, arguments)) is not None:
            return residue_gradients
    statistics = launch_row_statistics(grad_output, output, lse)

    def compute(
        likes: Sequence[Tensor], kernels: tuple[Launcher, Launcher], *sizes: int
    ) -> Sequence[Tensor]:
        """Compute the gradients of ``likes``: the query, or the key and the value."""
        are_keys = len(likes) == 2
        launches = _make_lists(query.device, work, tiles.rows, tiles.block, tiles_are_keys=are_keys)
        # Several launches add up, which is done in float32.
        target_dtype = dtype or torch.float32 if len(launches) == 1 else torch.float32
        is_partial = not launches or launches[0].num_rows < likes[0].shape[2]
        new = torch.zeros if is_partial else torch.empty
        targets = into or [new(t.shape, dtype=target_dtype, device=t.device) for t in likes]
        for i, lists in enumerate(launches):
            scales = (scale, scale / math.log(2)) if tiles.on_hopper else (scale,)
            _launch(
                kernels,
                operands,
                tiles,
                lists,
                (*statistics, *targets),
                (*lists.steps, *sizes, *scales),
                grad_output=grad_output,
                tiles_are_keys=are_keys,
                IS_SUM=into is not None or i > 0,
            )
        return into or [target.to(dtype or torch.float32) for target in targets]

    gradients: list[Tensor] = []
    sizes = num_heads, num_queries
    if into is None or len(into) == 1:
        gradients += compute([query], _QUERY_KERNELS, *sizes, head_dim)
    if into is None or len(into) == 2:
        gradients += compute([key, value], _KEY_KERNELS, *sizes, num_keys, head_dim, value_dim)
    return gradients


def _gradients_of_residues(
    operands: TaskOperands, arguments: tuple[Any, ...]
) -> Sequence[Tensor] | None:
    """Compute the gradients of a dilated pattern in one launch, or return None if that is slower.

    Args:
        operands: Tensors and options for which the kernels for Hopper GPUs are chosen.
        arguments: The other arguments of ``gradients_of_rectangles``.
    """
    query, key, _, work, _, dropout, _, terms, _ = operands
    if dropout is not None or terms is not None:
        return None
    residues = find_residues(work, query.shape[2], key.shape[2])
    if residues is None or not residues.is_faster:
        return None
    folded = residues.fold_operands(operands)
    if takes_visits(folded):
        compute = gradients_of_visits
    elif takes_rectangle_kernel(folded):
        compute = gradients_of_rectangles
    else:
        return None
    num_kv_heads = key.shape[1]
    *output_tensors, dtype, num_programs = arguments
    grad_output, output, lse = (residues.fold(tensor, num_kv_heads) for tensor in output_tensors)
    gradients = list(compute(folded, grad_output, output, lse, dtype, num_programs))
    del folded, grad_output, output, lse  # with GQA they are copies
    return residues.unfold_gradients(gradients, num_kv_heads)


_FORWARD_KERNELS = Launcher(attend_tiles), Launcher(attend_tiles_on_hopper)
_QUERY_KERNELS = Launcher(query_gradients), Launcher(query_gradients_on_hopper)
_KEY_KERNELS = Launcher(key_gradients), Launcher(key_gradients_on_hopper)


def _bounds_exponents(operands: TaskOperands) -> bool:
    """Return whether the soft cap bounds the exponents, see ``_shift_of_cap``."""
    if operands.terms is None or operands.query.dtype != torch.bfloat16:
        return False
    terms = operands.terms.terms
    if (
        terms.alibi_slopes is not None
        or not _BOUNDING_CAPS[0] <= terms.softcap <= _BOUNDING_CAPS[1]
    ):
        return False
    # The seventh power of this number must be a float32 number.
    return 1e-5 <= operands.scale / terms.softcap <= 1e4


class _Lists(NamedTuple):
    """Tiles and runs of a launch, on the device; tiles.py defines them and their fields."""

    steps: Steps
    """Tokens from a row to the next one, and from a column to the next one."""
    tiles: Tensor
    """int32 ``[num_tiles, fields]``: the rows of each tile, and its runs."""
    runs: Tensor
    """int32 ``[num_runs, fields]``: columns that a tile visits, and the band of live pairs."""
    mask_bits: Tensor | None
    """Bits of the pairs of irregular patterns; ``None`` if there are none."""
    num_rows: int
    """Number of rows of all tiles."""
    blocks: np.ndarray
    """int64 ``[num_tiles]``: number of blocks that each tile visits, descending."""
    num_polls: int
    """Maximum number of polls of ``wait_for_programs``; 0 if programs do not wait."""

    def num_long(self, num_heads: int, num_programs: int) -> int:
        """Return the number of tiles with more than a quarter of the blocks of one program.

        Args:
            num_heads: Number of heads of all batch elements; each has all tiles.
            num_programs: Number of programs, which share the blocks of all heads.
        """
        limit = int(self.blocks.sum()) * num_heads // (4 * num_programs)
        return int(np.searchsorted(-self.blocks, -limit))


def _choose_forward_lists(operands: TaskOperands, *, packed: bool) -> tuple[Tiles, list[_Lists]]:
    """Return the tiles of a forward pass, and its launches."""
    query, _, value, work, _, _, _, terms, is_unit = operands
    tiles = choose_tiles(operands, is_backward=False)
    if (
        tiles.on_hopper
        and not is_unit
        and terms is None
        and max(query.shape[-1], value.shape[-1]) <= 64
        and query.shape[:3].numel()
        >= _MIN_ITEMS_OF_THREE * _ROWS_OF_THREE * num_processors(query.device)
        and _suits_three_consumers(work, tiles.block, packed)
    ):
        tiles = tiles._replace(rows=_ROWS_OF_THREE, options=tiles.options | {"CONSUMERS": 3})
    return tiles, _make_lists(query.device, work, tiles.rows, tiles.block, packed=packed)


@lru_cache(maxsize=256)
def _suits_three_consumers(work: Work, block: int, packed: bool) -> bool:
    """Return whether tiles are long, and have few rows more than the output; without mask bits."""
    if any(view.bits is not None for block_row in work.block_rows for view in block_row.views):
        return False
    for launch in query_launches(work, packed=packed):
        tile_list = make_tile_list(launch, _ROWS_OF_THREE, block)
        num_tiles = len(tile_list.tiles)
        is_short = tile_list.blocks.sum() < _MIN_BLOCKS_OF_THREE * num_tiles
        if is_short or num_tiles * _ROWS_OF_THREE > _MAX_ROWS_OF_THREE * _num_tile_rows(tile_list):
            return False
    return True


def _num_tile_rows(tiles: TileList) -> int:
    return int((tiles.tiles[:, TILE_ROW_STOP] - tiles.tiles[:, TILE_ROW_START]).sum())


def _num_polls(blocks: np.ndarray) -> int:
    """Return the maximum number of polls of ``wait_for_programs``; 0 if programs do not wait.

    Programs wait only if their tiles visit nearly equal numbers of blocks. Otherwise they would not
    read the same keys at the same time, even if they start together.

    Args:
        blocks: int64 ``[num_tiles]``: number of blocks that each tile visits, descending.
    """
    if not len(blocks) or blocks[0] < _MIN_BLOCKS_TO_WAIT:
        return 0
    longest, shortest = int(blocks[0]), int(blocks[-1])
    return int(_POLLS_PER_BLOCK * longest) if longest - shortest <= longest // 64 else 0


@cached_on_device
def _make_lists(
    device: torch.device,
    work: Work,
    tile_rows: int,
    block: int,
    *,
    tiles_are_keys: bool = False,
    packed: bool = False,
) -> list[_Lists]:
    """Return the launches of a pass, one for each pair of steps; kept with their device tensors.

    Args:
        device: Device of the tables.
        work: Block rows with their live pairs.
        tile_rows: Rows of a tile.
        block: Columns that a tile visits at a time.
        tiles_are_keys: Whether tiles are of keys and runs of queries; otherwise the reverse.
        packed: Whether results of block rows lie one after another; otherwise they are at the rows
            of the query.
    """
    lists = []
    for launch in key_launches(work) if tiles_are_keys else query_launches(work, packed=packed):
        tile_list = make_tile_list(launch, tile_rows, block)
        arrays = tile_list.tiles, tile_list.runs, launch.mask_bits
        tiles, runs, bits = (torch.from_numpy(array).to(device) for array in arrays)
        mask_bits = bits if len(bits) else None
        numbers = _num_tile_rows(tile_list), tile_list.blocks, _num_polls(tile_list.blocks)
        lists.append(_Lists(launch.steps, tiles, runs, mask_bits, *numbers))
    return lists


def _launch(
    kernels: tuple[Launcher, Launcher],
    operands: TaskOperands,
    tiles: Tiles,
    lists: _Lists,
    tensors: Sequence[Tensor],
    numbers: tuple[Any, ...],
    *,
    grad_output: Tensor | None = None,
    sinks: Tensor | None = None,
    tiles_are_keys: bool = False,
    **options: bool,
) -> None:
    """Launch a kernel over all tiles of all heads.

    Args:
        kernels: The kernels for all GPUs and for Hopper GPUs.
        operands: Tensors and options of the call.
        tiles: Sizes of the tiles.
        lists: Tiles and runs.
        tensors: The kernel's arguments between the descriptors and the tiles.
        numbers: The kernel's arguments after the numbers of tiles and items.
        grad_output: Gradient of the output, which has the last descriptor; ``None`` forward.
        sinks: ``[num_heads]``, contiguous, which only forward kernels take; ``None`` without.
        tiles_are_keys: Whether tiles are of keys and runs of queries.
        options: Further constants of the kernel.
    """
    query, key, value, _, _, dropout, dropout_bits, terms, _ = operands
    described = (query, key, value) if grad_output is None else (query, key, value, grad_output)
    softcap = terms.terms.softcap or None if terms else None
    slopes, bias = _term_tensors(operands)
    term_tensors = [tensor for tensor in (slopes, bias, sinks) if tensor is not None]
    all_tensors = *described, *tensors, *term_tensors
    if tiles.on_hopper:
        all_tensors = *all_tensors, new_counter(query.device)

    def make(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Arguments:
        rows_of_tile = 64 if tiles.on_hopper else tiles.rows  # there: those of a consumer
        sides = [(lists.steps.row, rows_of_tile), (lists.steps.column, tiles.block)]
        query_block, key_block = sides[::-1] if tiles_are_keys else sides
        descriptors = [
            describe(query, *query_block, on_hopper=tiles.on_hopper),
            describe(key, *key_block, on_hopper=tiles.on_hopper),
            describe(value, *key_block, on_hopper=tiles.on_hopper),
        ]
        if grad_output is not None:
            descriptors.append(describe(others[0], *query_block, on_hopper=tiles.on_hopper))
            others = others[1:]
        written, added = others[: len(tensors)], list(others[len(tensors) :])
        slope_alias = None if slopes is None else added.pop(0)
        bias_alias = None if bias is None else added.pop(0)
        sink_alias = None if sinks is None else added.pop(0)
        num_tiles = len(lists.tiles)
        num_heads = (key if tiles_are_keys else query).shape[:2].numel()
        num_items = num_tiles * num_heads
        constants: dict[str, Any] = {
            "GROUP_SIZE": query.shape[1] // key.shape[1],
            "softcap": softcap,
            **tiles.options,
            **options,
        }
        if grad_output is None:
            constants["sinks"] = sink_alias
            if tiles.on_hopper:
                constants["IS_BOUNDED"] = sinks is None and _bounds_exponents(operands)
        if tiles.on_hopper:
            (counter,) = added
            grid = one_per_processor(num_items, query.device)
            counts = num_tiles, lists.num_long(num_heads, *grid), num_items
            bits = lists.tiles if lists.mask_bits is None else lists.mask_bits  # a pointer
            constants |= {"HAS_BITS": lists.mask_bits is not None, "num_warps": 4}
            positional = *descriptors, *written, lists.tiles, lists.runs, bits, slope_alias, counter
            return grid, (*positional, *counts, *numbers), constants
        constants |= {
            "bias_strides": None if bias_alias is None else bias_alias.stride(),
            "drop_below": 0 if dropout is None else dropout.threshold,
            "keep_scale": 1.0 if dropout is None else dropout.scale,
            "TILE_Q": query_block[1],
            "TILE_K": key_block[1],
            "BLOCK_D": triton.next_power_of_2(query.shape[-1]),
            "BLOCK_V": triton.next_power_of_2(value.shape[-1]),
            "PRECISION": "tf32x3" if query.dtype == torch.float32 else "ieee",
        }
        masks = lists.mask_bits, dropout_bits, slope_alias, bias_alias
        positional = *descriptors, *written, lists.tiles, lists.runs, *masks, num_tiles
        return (num_items,), (*positional, *numbers), constants

    records = lists.tiles, lists.runs
    kept = records if lists.mask_bits is None else (*records, lists.mask_bits)
    signature = dropout, softcap, tiles_are_keys, numbers, *options.values()
    kernels[tiles.on_hopper].launch(all_tensors, make, key=signature, kept=kept)


def _term_tensors(operands: TaskOperands) -> tuple[Tensor | None, Tensor | None]:
    """Return slopes divided by ln 2, ``[batch, num_heads]``, and the bias of all pairs, or None."""
    query, key, _, work, _, _, _, terms, _ = operands
    if terms is None:
        return None, None
    slopes, bias = terms.terms.alibi_slopes, terms.bias
    if slopes is not None:
        assert work.positions is not None
        slopes = (slopes / math.log(2)).expand(query.shape[:2]).contiguous()
    if bias is not None:
        bias = bias.expand(*query.shape[:3], key.shape[2])
    return slopes, bias
