"""Verification of the shards of a result: every rank recomputes sampled rows in float64."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.agreement import Shards, control_group, swap_texts
from cqs.executors.distributed.route import cut_shards
from cqs.executors.verify import VerificationError, kv_places, sample_rows, verify_heads
from cqs.partial import Partial
from cqs.problem import Problem


@torch.no_grad()
def verify_shards(group: Any, problem: Problem, answer: Partial, shards: Shards) -> None:
    """Compare sampled rows of this rank's queries with float64 attention; all ranks must call this.

    Keys and values of one KV head at a time are gathered on every rank.

    Args:
        group: The process group.
        problem: This rank's shards, with the options of the whole sequence.
        answer: Output and LSE of this rank's queries.
        shards: Shard lengths of all ranks.

    Raises:
        VerificationError: A row of a rank deviates by more than its bound. All ranks raise; the
            message names the rank and the row of the whole sequence.
        RuntimeError: A rank has failed.
    """
    rank = dist.get_rank(group)
    tensors = problem.query, problem.key, problem.value
    lengths = shards.seqlens_q, shards.seqlens_kv, shards.seqlens_kv
    query, key, value = (
        # The shape of the whole sequence, without its memory or values.
        shard.new_empty(()).expand(*shard.shape[:2], sum(numbers), shard.shape[3])
        for shard, numbers in zip(tensors, lengths, strict=True)
    )
    whole = replace(problem, query=query, key=key, value=value)
    gathered = (
        _gather(shard[place], shards.seqlens_kv, rank, group)
        for place in kv_places(whole)
        for shard in (problem.key, problem.value)
    )

    def gather_next(place: tuple[int, int]) -> Tensor:
        return next(gathered)

    read = problem.query.__getitem__, gather_next, gather_next, *(t.__getitem__ for t in answer)
    message = ""
    try:
        queries = cut_shards(shards.seqlens_q)[rank]
        verify_heads(whole, read, sample_rows(len(queries)), queries.start)
    except VerificationError as error:
        message = str(error)
    for _ in gathered:  # the other ranks require the rest of this rank's keys and values
        pass
    for wrong_rank, text in enumerate(swap_texts(control_group(group), message)):
        if text:
            raise VerificationError(f"rank {wrong_rank} of the group: {text}")


def _gather(shard: Tensor, lengths: Sequence[int], rank: int, group: Any) -> Tensor:
    """Return the concatenation of all ranks' shards ``[rows, dim]`` of uneven lengths."""
    parts = [shard.new_empty(length, shard.shape[1]) for length in lengths]
    parts[rank].copy_(shard)
    for source, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, group=group, group_src=source)
    return torch.cat(parts)
