"""All copies of a schedule in a single Triton kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cqs.cuda_graphs import cached_on_device
from cqs.distributed.row_copies import CopySchedule

_BLOCK_ROWS = 64


def copy_rows(sources: Sequence[Tensor], targets: Sequence[Tensor], schedule: CopySchedule) -> None:
    """Run all copies of a schedule; called by :func:`cqs.distributed.row_copies.copy_rows`.

    Args:
        sources: CUDA tensors ``[batch, heads, rows, dim]`` with a last stride of 1.
        targets: CUDA tensors of the sources' dtype, batch and dim, with a last stride of 1.
        schedule: The copies, at least one.
    """
    batch, *_, dim = targets[0].shape
    num_heads = max(each.num_heads for each in schedule)
    num_blocks = triton.cdiv(max(each.num_rows for each in schedule), _BLOCK_ROWS)
    device = targets[0].device
    with torch.cuda.device_of(targets[0]):  # Triton launches on the current device
        _move[(num_blocks, batch * num_heads, len(schedule))](
            tuple(sources),
            tuple(targets),
            tuple(source.stride()[:3] for source in sources),
            tuple(target.stride()[:3] for target in targets),
            _table(device, schedule),
            num_heads,
            dim,
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )


@cached_on_device
def _table(device: torch.device, schedule: CopySchedule) -> Tensor:
    return torch.tensor(schedule, dtype=torch.int32).to(device)


@triton.jit(do_not_specialize=["num_heads"])
def _move(
    sources,
    targets,
    source_strides,
    target_strides,
    schedule,
    num_heads,
    dim,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy up to ``BLOCK_ROWS`` rows of one batch and head of one copy of the schedule."""
    fields = schedule + tl.program_id(2) * 7
    number = tl.load(fields)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    num_rows = tl.where(head < tl.load(fields + 6), tl.load(fields + 3), 0)
    mask = (rows < num_rows)[:, None] & (columns < dim)[None, :]
    for i in tl.static_range(len(sources)):
        if number == i:
            strides = source_strides[i]
            place = batch * strides[0] + (tl.load(fields + 4) + head) * strides[1]
            source_rows = (tl.load(fields + 1) + rows).to(tl.int64)
            place = place + source_rows[:, None] * strides[2] + columns[None, :]
            values = tl.load(sources[i] + place, mask=mask)
            strides = target_strides[i]
            place = batch * strides[0] + (tl.load(fields + 5) + head) * strides[1]
            target_rows = (tl.load(fields + 2) + rows).to(tl.int64)
            place = place + target_rows[:, None] * strides[2] + columns[None, :]
            tl.store(targets[i] + place, values, mask=mask)
