"""2-D attention: ranks in a grid gather queries along its rows and keys along its columns."""
# ruff: noqa: D102, Method documents the methods

from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_methods.chunked import Chunked, wait_for
from benchmarks.peer_methods.collectives import exchange
from benchmarks.peer_methods.kernel_calls import KernelCall, make_kernel_call
from benchmarks.peer_methods.views import heads_first, rows_first
from cqs.partial import Partial, lse_dtype, merge_rows
from cqs.problem import Problem


class Grid(Chunked):
    """Rank (i, j) of b x a computes the queries of row i and the keys of column j.

    As Attention2D (Elango et al., arXiv 2503.15758): partial outputs go back to the rank of their
    queries, which merges them; gradients are reduced and scattered along rows and columns. Of all
    numbers of columns the one with the least traffic is taken. The forward pass saves the gathered
    tensors.
    """

    def why_not(self, problem: Problem) -> str | None:
        if all(self.num_ranks % number for number in range(2, self.num_ranks)):
            return f"requires a number of ranks that is not prime, got {self.num_ranks}"
        return super().why_not(problem)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        row, column = self._lines(query.shape[1] / key.shape[1])
        held = [self._gather(*each) for each in ((row, query), (column, key), (column, value))]
        call = self._call(row, column, query.shape[2] // 2)
        lse = held[0].new_full(held[0].shape[:3], -torch.inf, dtype=lse_dtype(query.dtype))
        found = Partial(held[0].new_zeros((*lse.shape, value.shape[3])), lse)
        if call is not None:
            part, rows = self.compute(call, *held)
            for target, source in zip(found, part, strict=True):
                target[:, :, rows] = source
        returned = zip(*(self._return(row, each) for each in found), strict=True)
        answer = Partial(*(torch.empty_like(each[:, :, : query.shape[2]]) for each in found))
        merge_rows(answer, [(Partial(*part), slice(None)) for part in returned])
        return answer.output, (row, column, call, held, answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        row, column, call, held, answer = saved
        grad, output, lse = (self._gather(row, each) for each in (grad_output, *answer))
        sums = [torch.zeros_like(each, dtype=lse_dtype(each.dtype)) for each in held]
        if call is not None:
            gradients = self.differentiate(call, (*held, output, lse), grad, *held[1:])
            places = call.rows, call.columns, call.columns
            for target, source, rows in zip(sums, gradients, places, strict=True):
                target[:, :, rows] = source
        lines = row, column, column
        return tuple(
            torch.stack(self._return(line, each)).sum(0).to(grad_output.dtype)
            for line, each in zip(lines, sums, strict=True)
        )

    def _lines(self, ratio: float) -> tuple[range, range]:
        """Return the ranks of this rank's row and column, given query heads per KV head."""
        num_columns = min(
            (n for n in range(2, self.num_ranks) if self.num_ranks % n == 0),
            key=lambda n: (n - 1) + (self.num_ranks // n - 1) / ratio,
        )
        i, j = divmod(self.rank, num_columns)
        row = range(i * num_columns, (i + 1) * num_columns)
        return row, range(j, self.num_ranks, num_columns)

    def _chunks_of(self, line: range) -> list[int]:
        """Return the chunks of the ranks of a line, in the order of the ranks."""
        return [chunk for rank in line for chunk in self.chunks(rank)]

    def _call(self, row: range, column: range, length: int) -> KernelCall | None:
        queries, keys = (tuple(sorted(self._chunks_of(line))) for line in (row, column))
        return make_kernel_call(queries, tuple(enumerate(keys)), length, self.is_causal)

    def _gather(self, line: range, shard: Tensor) -> Tensor:
        """Return the rows of all ranks of a line, with the chunks in ascending order."""
        source = rows_first(shard)
        found = torch.cat(self._exchange(line, [source] * len(line)))
        chunks = self._chunks_of(line)
        order = sorted(range(len(chunks)), key=chunks.__getitem__)
        return heads_first(_reorder(found, order))

    def _return(self, line: range, found: Tensor) -> list[Tensor]:
        """Send results back to the ranks of their rows; return those of this rank's rows."""
        chunks = self._chunks_of(line)
        ascending = sorted(chunks)
        packed = _reorder(rows_first(found), [ascending.index(chunk) for chunk in chunks])
        pieces = list(packed.chunk(len(line)))
        return list(map(heads_first, self._exchange(line, pieces)))

    def _exchange(self, line: range, pieces: list[Tensor]) -> list[Tensor]:
        """Send a piece to every rank of a line, one at a time; return those from every rank."""
        own, received = line.index(self.rank), list(pieces)
        for distance in range(1, len(line)):
            to, source = ((own + each) % len(line) for each in (distance, -distance))
            received[source] = torch.empty_like(pieces[source])
            sends, receipts = [(line[to], pieces[to])], [(line[source], received[source])]
            wait_for(exchange(sends, receipts, self.group))
        return received


def _reorder(tensor: Tensor, order: list[int]) -> Tensor:
    """Return rows with their equal chunks in another order."""
    if order == sorted(order):
        return tensor
    chunks = tensor.chunk(len(order))
    return torch.cat([chunks[place] for place in order])
