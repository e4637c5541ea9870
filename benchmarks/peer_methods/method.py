"""What any way to spread attention over ranks must do to be timed beside others."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.views import heads_first, rows_first
from cqs.problem import Problem
from cqs.worker import Worker


class Method(ABC):
    """One way, as one rank sees it."""

    def __init__(self, group: Any, worker: Worker, *, is_causal: bool):
        """Take the process group, and what computes on every rank."""
        self.group, self.worker, self.is_causal = group, worker, is_causal
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def why_not(self, problem: Problem) -> str | None:
        """Say why this cannot take such a problem, or return None if it can."""
        return None

    @abstractmethod
    def tokens(self, seqlen: int) -> tuple[range, ...]:
        """Return the tokens of this rank's shard, in their order there."""

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of ``[batch, heads, seqlen, dim]``, if one range as a view."""
        parts = [rows_first(whole)[r.start : r.stop] for r in self.tokens(whole.shape[2])]
        return heads_first(parts[0] if len(parts) == 1 else torch.cat(parts))

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        """Return the output for the queries of a shard, and what the backward pass needs."""

    @abstractmethod
    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the shard; any number of times."""
