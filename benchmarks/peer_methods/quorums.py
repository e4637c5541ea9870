"""The method of :mod:`cqs.distributed`."""
# ruff: noqa: D102, Method documents the methods

from typing import Any

import torch
from torch import Tensor

import cqs.distributed
from benchmarks.peer_methods.differentiable import Differentiable
from cqs.problem import Problem
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import predict_ring
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import Workload


class Cqs(Differentiable):
    """:func:`cqs.distributed.attention`: contiguous shards, which may differ in length."""

    def __init__(
        self,
        *arguments: Any,
        head_parallel: int | str = "auto",
        is_limited: bool = False,
        **options: Any,
    ):
        """Also take the head-parallel degree, and whether to hold at most what a ring holds."""
        super().__init__(*arguments, **options)
        self.head_parallel, self.is_limited = head_parallel, is_limited

    def why_not(self, problem: Problem) -> str | None:
        seqlen = problem.query.shape[2]
        if self.is_limited and seqlen % self.num_ranks:  # the limit must be equal on all ranks
            return f"requires tokens in multiples of {self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        first, stop = (seqlen * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return (range(first, stop),)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        limit = self._ring_bytes(query, key) if self.is_limited else None
        output = cqs.distributed.attention(
            query,
            key,
            value,
            group=self.group,
            is_causal=self.is_causal,
            scale=self.worker.scale,
            strategy=cqs.distributed.Strategy(self.head_parallel, max_bytes=limit),
            backend=self.worker.backend,
        )
        assert isinstance(output, Tensor)
        return output

    def _ring_bytes(self, query: Tensor, key: Tensor) -> int:
        """Return the bytes that a rank of a ring holds besides its shard and its results."""
        batch, heads, rows, head_dim = query.shape
        shape = AttentionShape(heads, head_dim, batch, key.shape[1], itemsize=query.itemsize)
        workload = Workload(rows * self.num_ranks, shape, self.is_causal)
        is_backward = torch.is_grad_enabled() and query.requires_grad
        ring = predict_ring(workload, self.num_ranks, Machine(), 1, is_backward=is_backward)
        queries, keys, results = workload.shard_bytes(self.num_ranks)
        return int(ring.peak_bytes) - results - (queries + keys if is_backward else 0)
