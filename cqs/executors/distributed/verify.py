"""Verification of the shards of a result: every rank recomputes sampled rows in float64."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.agreement import control_group, swap
from cqs.executors.verify import RowCheck, VerificationError, sample_rows
from cqs.partial import Partial
from cqs.problem import Problem


@torch.no_grad()
def verify_shards(
    group: "dist.ProcessGroup | None",
    problem: Problem,
    answer: Partial,
    seqlens_q: Sequence[int],
    seqlens_kv: Sequence[int],
) -> None:
    """Compare sampled rows of this rank's queries with float64 attention; all ranks must call this.

    Keys and values of one KV head at a time are gathered on every rank.

    Args:
        group: The process group; ``None`` means the default group.
        problem: This rank's shards, with the options of the whole sequence.
        answer: Output and LSE of this rank's queries.
        seqlens_q: Number of queries in every rank's shard.
        seqlens_kv: Number of keys in every rank's shard.

    Raises:
        VerificationError: A row of a rank deviates by more than its bound. All ranks raise; the
            message names the rank and the row of the whole sequence.
        RuntimeError: A rank has failed.
    """
    rank = dist.get_rank(group)
    rows = sample_rows(seqlens_q[rank])
    index = torch.tensor(rows, dtype=torch.int64, device=problem.query.device)
    positions = [sum(seqlens_q[:rank]) + row for row in rows]
    whole = replace(
        problem,
        query=_shape_of_whole(problem.query, seqlens_q),
        key=_shape_of_whole(problem.key, seqlens_kv),
        value=_shape_of_whole(problem.value, seqlens_kv),
    )
    message = ""
    for (where, part), (_, whole_part) in zip(problem.parts(), whole.parts(), strict=True):
        check = RowCheck(whole_part, positions) if rows else None
        of_queries = part.query, *(tensor[where] for tensor in answer)
        batches, num_heads = part.query.shape[:2]
        group_size = num_heads // part.key.shape[1]
        for head in range(num_heads):
            if head % group_size == 0:
                of_keys = [
                    _gather(tensor[:, head // group_size], seqlens_kv, rank, group)
                    for tensor in (part.key, part.value)
                ]
            if check is None or message:
                continue  # but take part in the communication
            try:
                for batch in range(batches):
                    sampled = (tensor[batch, head, index] for tensor in of_queries)
                    check(batch, head, *sampled, *(tensor[batch] for tensor in of_keys))
            except VerificationError as error:
                message = str(error)
    _raise_together(group, message)


def _shape_of_whole(shard: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return a tensor of the shape of the whole sequence, without its memory or values."""
    batch, heads, _, dim = shard.shape
    return shard.new_empty(()).expand(batch, heads, sum(lengths), dim)


def _gather(shard: Tensor, lengths: Sequence[int], rank: int, group: Any) -> Tensor:
    """Return the concatenation of all ranks' shards ``[batch, rows, dim]`` of uneven lengths."""
    batch, _, dim = shard.shape
    parts = [shard.new_empty(batch, length, dim) for length in lengths]
    parts[rank].copy_(shard)
    for source, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, group=group, group_src=source)
    return torch.cat(parts, dim=1)


def _raise_together(group: Any, message: str) -> None:
    """Raise VerificationError on all ranks if one passes a message, which is not empty then."""
    control, text = control_group(group), message.encode()
    lengths = swap(control, [len(text)], [1] * dist.get_world_size(group))
    if not any(lengths):
        return
    texts = bytes(swap(control, text, lengths))
    rank = next(rank for rank, length in enumerate(lengths) if length)
    raise VerificationError(f"rank {rank} of the group: {texts[: lengths[rank]].decode()}")
