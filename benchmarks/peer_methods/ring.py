"""Ring attention: ranks keep their queries and pass keys and values on."""
# ruff: noqa: D102, Method documents the methods

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.chunked import Chunked, merge_parts, wait_for
from benchmarks.peer_methods.collectives import exchange
from benchmarks.peer_methods.kernel_calls import KernelCall
from benchmarks.peer_methods.views import heads_first, rows_first
from cqs.partial import Gradients


class Ring(Chunked):
    """Ranks pass keys and values around a ring (Liu et al., arXiv 2310.01889), zig-zag if causal.

    Partial outputs are kept and merged once: this reads and writes the fewest bytes, but stores one
    output per rank. In the backward pass the gradients of keys and values follow one rank behind
    them, in float32. The last hop, in the dtype of the query, returns them to their rank.
    """

    def why_not(self) -> str | None:
        if self.problem.pattern is not None and not self.cuts_documents:
            return "requires documents: cuts of other patterns are not balanced in every hop"
        return super().why_not()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        held = [rows_first(key), rows_first(value)]
        buffers = [list(map(torch.empty_like, held)) for _ in range(min(2, self.num_ranks - 1))]
        parts = []
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            received = [] if is_last else buffers[hop % 2]
            transfers = self._pass_on([] if is_last else held, received)
            parts.append(self.compute(self._call(query, hop), query, *map(heads_first, held)))
            wait_for(transfers)
            held = received
        answer = merge_parts(parts)
        return answer.output, (query, key, value, *answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = saved
        held = [rows_first(key), rows_first(value)]
        buffers = [list(map(torch.empty_like, held)) for _ in range(min(2, self.num_ranks - 1))]
        grad_query, *sums = self._own_gradients(saved, grad_output, held, buffers)
        spare = list(map(torch.empty_like, sums))
        for hop in range(1, self.num_ranks):
            held = buffers[(hop - 1) % 2]
            is_last = hop == self.num_ranks - 1
            received = [] if is_last else buffers[hop % 2]
            transfers = self._pass_on([*([] if is_last else held), *sums], [*received, *spare])
            call = self._call(query, hop)
            found = self.differentiate(call, saved, grad_output, *map(heads_first, held))
            grad_query[:, :, call.rows] += found.query
            wait_for(transfers)
            sums, spare = spare, sums
            for total, part in zip(sums, found[1:], strict=True):
                total[:, :, call.columns] += part
        rounded = [total.to(query.dtype) for total in sums]
        if self.num_ranks > 1:
            returned = list(map(torch.empty_like, rounded))
            wait_for(self._pass_on(rounded, returned))
            rounded = returned
        return grad_query.to(query.dtype), *rounded

    def _own_gradients(
        self, saved: Any, grad_output: Tensor, held: list[Tensor], buffers: list[list[Tensor]]
    ) -> Gradients:
        """Compute the gradients of the pairs within the shard while its keys are sent."""
        transfers = self._pass_on(held, buffers[0]) if buffers else []
        found = self.differentiate(
            self._call(saved[0], 0), saved, grad_output, *map(heads_first, held)
        )
        wait_for(transfers)
        return Gradients(*(gradient.contiguous() for gradient in found))  # sent as they are

    def _call(self, query: Tensor, hop: int) -> KernelCall:
        """Return the call of the queries with the keys that are here after ``hop`` hops."""
        call = self.call(query, enumerate(self.chunks((self.rank - hop) % self.num_ranks)))
        assert call is not None
        return call

    def _pass_on(self, sent: list[Tensor], received: list[Tensor]) -> list[dist.Work]:
        """Send tensors to the next rank, and receive into others from the previous one."""
        following, previous = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        sends, receipts = [(following, t) for t in sent], [(previous, t) for t in received]
        return exchange(sends, receipts, self.group)
