"""The method of :mod:`cqs.distributed`."""
# ruff: noqa: D102, Method documents the methods

from typing import Any

from torch import Tensor

import cqs.distributed
from benchmarks.peer_methods.differentiable import Differentiable


class Cqs(Differentiable):
    """:func:`cqs.distributed.attention`: contiguous shards, which may differ in length."""

    def __init__(self, *arguments: Any, head_parallel: int | str = "auto", **options: Any):
        """Also take the head-parallel degree."""
        super().__init__(*arguments, **options)
        self.head_parallel = head_parallel

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        first, stop = (seqlen * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return (range(first, stop),)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = cqs.distributed.attention(
            query,
            key,
            value,
            group=self.group,
            is_causal=self.is_causal,
            scale=self.worker.scale,
            head_parallel=self.head_parallel,
            backend=self.worker.backend,
        )
        assert isinstance(output, Tensor)
        return output
