"""The interface of a method of context parallelism."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.views import heads_first, rows_first
from cqs.patterns import sliding_window
from cqs.problem import Problem


class Method(ABC):
    """A method of context parallelism on one rank."""

    def __init__(self, group: Any, problem: Problem, backend: str | None = None):
        """Take the process group, the problem, equal on all ranks, and the name of a backend."""
        self.group, self.problem, self.backend = group, problem, backend
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.heads = range(problem.query.shape[1])
        """The query heads that this rank computes."""

    def why_not(self) -> str | None:
        """Return why the method does not support the problem, or ``None`` if it does."""
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

    def count_scores(self, compute: Callable[[], object]) -> int:
        """Return the live pairs of all heads that this rank computes in a forward pass.

        Args:
            compute: Computes a pass; every rank of the group calls this method.
        """
        return count_scores(self.problem, self.heads, self.tokens(self.problem.query.shape[2]))


def count_scores(problem: Problem, heads: Iterable[int], queries: Iterable[range]) -> int:
    """Return the live pairs of some heads in some ranges of queries."""
    seqlen, rows = problem.query.shape[2], list(queries)
    pattern = problem.pattern or sliding_window(None, 0 if problem.is_causal else None)
    bound = [pattern.head(0, head).bind(seqlen) for head in heads]
    return sum(each.count(tokens, range(seqlen)) for each in bound for tokens in rows)
