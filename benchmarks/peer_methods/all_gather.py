"""All-gather of keys and values; every rank keeps its queries."""
# ruff: noqa: D102, Method documents the methods

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.chunked import Chunked, merge_parts, wait_for
from benchmarks.peer_methods.collectives import reduce_scatter
from benchmarks.peer_methods.kernel_calls import KernelCall
from benchmarks.peer_methods.views import heads_first, rows_first

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in PyTorch 2.13, or in earlier versions."""


class AllGather(Chunked):
    """Every rank gathers all keys and values; gradients of keys are reduced and scattered.

    As in the training of Llama 3 (arXiv 2407.21783), but overlapped: a rank attends to its own keys
    while it receives the others. The backward pass gathers them again, and meanwhile computes the
    second half of the rank's own keys; if causal, fewer queries see that half. It computes the
    first half while gradients are reduced and scattered, in float32.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        gathered, transfers = self._gather(key, value)
        own, rest = self._own(query), self._rest(query)
        parts = [self.compute(own, query, key, value)]
        wait_for(transfers)
        if rest:
            parts.append(self.compute(rest, query, *gathered))
        answer = merge_parts(parts)
        return answer.output, (query, key, value, *answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = saved
        gathered, transfers = self._gather(key, value)
        first, second = (self._own(query, [half]) for half in (0, 1))
        of_second = self.differentiate(second, saved, grad_output, key, value)
        wait_for(transfers)
        batch, num_kv_heads, num_rows, head_dim = key.shape
        packed = of_second.key.new_zeros(
            (self.num_ranks * num_rows, batch, 2 * num_kv_heads, head_dim)
        )
        found = [(second, of_second)]
        if rest := self._rest(query):
            of_rest = self.differentiate(rest, saved, grad_output, *gathered)
            heads = heads_first(packed)[:, :, rest.columns].split(num_kv_heads, dim=1)
            for target, part in zip(heads, of_rest[1:], strict=True):
                target.copy_(part)
            found.append((rest, of_rest))
        sums = packed.new_empty((num_rows, *packed.shape[1:]))
        transfer = reduce_scatter(sums, packed, self.group)
        of_first = self.differentiate(first, saved, grad_output, key, value)
        grad_query = of_first.query  # of all rows
        for call, gradients in found:
            grad_query[:, :, call.rows] += gradients.query
        transfer.wait()
        grads = heads_first(sums).split(num_kv_heads, dim=1)
        for call, gradients in ((first, of_first), (second, of_second)):
            for total, part in zip(grads, gradients[1:], strict=True):
                total[:, :, call.columns] += part
        return tuple(gradient.to(query.dtype) for gradient in (grad_query, *grads))

    def _gather(self, *shards: Tensor) -> tuple[list[Tensor], list[dist.Work]]:
        sources = list(map(rows_first, shards))
        gathered = [t.new_empty((self.num_ranks * len(t), *t.shape[1:])) for t in sources]
        transfers = [
            _all_gather(*pair, group=self.group, async_op=True)
            for pair in zip(gathered, sources, strict=True)
        ]
        return list(map(heads_first, gathered)), transfers

    def _own(self, query: Tensor, halves: Sequence[int] = (0, 1)) -> KernelCall:
        """Return the call of the queries with the keys of this shard, or with half of them."""
        chunks = self.chunks(self.rank)
        call = self.call(query, [(half, chunks[half]) for half in halves])
        assert call is not None
        return call

    def _rest(self, query: Tensor) -> KernelCall | None:
        """Return the call of the queries with the keys of all other shards."""
        chunks = [chunk for rank in range(self.num_ranks) for chunk in self.chunks(rank)]
        own = self.chunks(self.rank)
        return self.call(query, [pair for pair in enumerate(chunks) if pair[1] not in own])
