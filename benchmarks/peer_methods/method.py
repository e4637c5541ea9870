"""The interface of a method of context parallelism."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.views import heads_first, rows_first
from cqs.problem import Problem
from cqs.worker import Worker


class Method(ABC):
    """A method of context parallelism on one rank."""

    def __init__(self, group: Any, worker: Worker, *, is_causal: bool):
        """Take the process group, and the worker that computes on this rank."""
        self.group, self.worker, self.is_causal = group, worker, is_causal
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def why_not(self, problem: Problem) -> str | None:
        """Return why the method does not support a problem, or ``None`` if it does."""
        return None

    @abstractmethod
    def tokens(self, seqlen: int) -> tuple[range, ...]:
        """Return the tokens of this rank's shard, in its order."""

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of ``[batch, heads, seqlen, dim]``, as a view if possible."""
        parts = [rows_first(whole)[r.start : r.stop] for r in self.tokens(whole.shape[2])]
        return heads_first(parts[0] if len(parts) == 1 else torch.cat(parts))

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        """Return the output for the queries of a shard, and the state that backward needs."""

    @abstractmethod
    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value; may be called again."""
