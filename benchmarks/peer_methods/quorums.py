"""The method of :mod:`cqs.distributed`."""
# ruff: noqa: D102, Method documents the methods

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import cqs.distributed
from benchmarks.peer_methods.differentiable import Differentiable
from cqs.distributed import Strategy
from cqs.scheduler import AttentionShape, Plan
from cqs.scheduler.cost_model import predict_ring
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import Workload


class Cqs(Differentiable):
    """:func:`cqs.distributed.attention`: contiguous shards, which may differ in length."""

    def __init__(self, *arguments: Any, is_limited: bool = False, **strategy: Any):
        """Also take whether to hold at most what a ring holds, and options of the strategy."""
        super().__init__(*arguments)
        self.is_limited, self.strategy = is_limited, Strategy(**strategy)

    def why_not(self) -> str | None:
        seqlen = self.problem.query.shape[2]
        if self.is_limited and seqlen % self.num_ranks:  # the limit must be equal on all ranks
            return f"requires tokens in multiples of {self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        first, stop = (seqlen * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return (range(first, stop),)

    def attend(self, *tensors: Tensor) -> Any:
        limit = self._ring_bytes(*tensors[:2]) if self.is_limited else None
        return cqs.distributed.attention(
            *tensors,
            group=self.group,
            is_causal=self.problem.is_causal,
            pattern=self.problem.pattern,
            scale=self.problem.scale,
            strategy=replace(self.strategy, max_bytes=limit),
            backend=self.backend,
        )

    def count_scores(self, compute: Callable[[], object]) -> int:
        with _logged_plans() as plans:
            compute()
        scores = 0
        for ((_, heads), _), plan in zip(self.problem.cuts(), plans, strict=True):
            head_parallel = self.num_ranks // plan.num_tasks
            pairs = plan.task(self.rank // head_parallel).live_pairs
            scores += pairs * len(self.heads[heads]) // head_parallel
        return scores

    def _ring_bytes(self, query: Tensor, key: Tensor) -> int:
        """Return the bytes that a rank of a ring holds besides its shard and its results."""
        batch, heads, rows, head_dim = query.shape
        shape = AttentionShape(heads, head_dim, batch, key.shape[1], itemsize=query.itemsize)
        workload = Workload(rows * self.num_ranks, shape, self.problem.is_causal)
        is_backward = torch.is_grad_enabled() and query.requires_grad
        ring = predict_ring(workload, self.num_ranks, Machine(), 1, is_backward=is_backward)
        queries, keys, results = workload.shard_bytes(self.num_ranks)
        return int(ring.peak_bytes) - results - (queries + keys if is_backward else 0)


@contextmanager
def _logged_plans() -> Iterator[list[Plan]]:
    """Return the plans of forward passes, which are logged at level DEBUG."""
    logger, plans = logging.getLogger("cqs"), list[Plan]()

    def keep(record: logging.LogRecord) -> bool:
        match record.args:
            case ("forward", Plan() as plan, *_):
                plans.append(plan)
        return False

    level = logger.level
    logger.addFilter(keep)
    logger.setLevel(logging.DEBUG)
    try:
        yield plans
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)
