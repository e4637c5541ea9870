"""The computation of a block's results: its output and LSE, or its gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cqs.executors.streaming.plan import HeldBlock, Pass, StreamPlan
from cqs.partial import Partial, RunningMerge, lse_dtype
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker

Chunks = Iterator[tuple[range, list[Tensor]]]
"""The chunks of a block: their tokens and tensors, ``[1, heads, tokens, columns]`` on the device.
The tensors are overwritten after the next chunk was requested."""


@dataclass(frozen=True)
class Reduction:
    """Computes the results of the blocks of a plan."""

    plan: StreamPlan
    worker: Worker

    def reduce(self, block: HeldBlock, held: list[Tensor], chunks: Chunks) -> Sequence[Tensor]:
        """Compute the results of a block from its tensors and all of its chunks.

        Tensors and results are ``[1, heads, tokens, columns]`` on the device. Results have memory
        of their own.
        """
        forward = self.plan.which == Pass.FORWARD
        return (self._attend if forward else self._differentiate)(block, held, chunks)

    def _attend(
        self, block: HeldBlock, held: Sequence[Tensor], chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        """Compute output and LSE of a block of queries from chunks of keys and values."""
        (query,) = held
        shape, sums = query.shape[:3], lse_dtype(query.dtype)
        output_shape = (*shape, self.plan.shape.value_columns)
        answer: Partial | None = None
        if len(block.chunks) > 1:
            empty = query.new_empty(output_shape, dtype=sums), query.new_empty(shape, dtype=sums)
            merge = RunningMerge(Partial(*empty))
            for tokens, keys in chunks:
                merge.add(self._attend_chunk(block, tokens, query, keys, sums))
            answer = merge.finish()
        for tokens, keys in chunks:  # one or none: nothing to merge, no buffer for sums
            answer = self._attend_chunk(block, tokens, query, keys, query.dtype)
        if answer is None:
            lse = query.new_full(shape, -torch.inf, dtype=sums)
            answer = Partial(query.new_zeros(output_shape), lse)
        return answer.output.to(query.dtype), answer.lse.unsqueeze(-1)

    def _differentiate(
        self, block: HeldBlock, held: Sequence[Tensor], chunks: Chunks
    ) -> list[Tensor]:
        """Compute the gradients of a block's queries, or of its keys and values."""
        holds_keys = self.plan.holds_keys
        mine = held if holds_keys else held[:1]
        sums = [torch.zeros_like(tensor, dtype=lse_dtype(tensor.dtype)) for tensor in mine]
        for tokens, tensors in chunks:
            of_queries, of_keys = (tensors, held) if holds_keys else (held, tensors)
            of_queries = [*of_queries[:3], of_queries[3].squeeze(-1)]
            worker, steps, operands = self._prepare(block, tokens, of_queries, of_keys)
            worker.add_gradients(sums, steps, *operands)
        return [each.to(held[0].dtype) for each in sums]

    def _attend_chunk(
        self,
        block: HeldBlock,
        tokens: range,
        query: Tensor,
        keys: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> Partial:
        worker, steps, operands = self._prepare(block, tokens, [query], keys)
        return worker.run_together(steps, *operands, dtype=dtype)

    def _prepare(
        self,
        block: HeldBlock,
        tokens: range,
        of_queries: Sequence[Tensor],
        of_keys: Sequence[Tensor],
    ) -> tuple[Worker, tuple[Step, ...], list[HeldTokens]]:
        """Return worker, steps and tensors of one chunk, in the argument order of :class:`Worker`.

        Without pattern and dropout, positions are counted from the first token of the block and of
        the chunk. Chunks of equal geometry then share cached tile lists.
        """
        worker, shift = self.worker, 0
        queries, keys = self.plan.sides(block.tokens, tokens)
        if worker.dropout is not None:
            dropout = worker.dropout.moved(block.batch, block.heads.start)
            worker = replace(worker, dropout=dropout)
        elif worker.pattern is None:
            shift = queries.start - keys.start
            queries, keys = range(len(queries)), range(len(keys))
        steps = self.plan.steps(queries, keys, shift)
        query, *others = (HeldTokens.packed(tensor, [queries]) for tensor in of_queries)
        return worker, steps, [query, *(HeldTokens.packed(t, [keys]) for t in of_keys), *others]
