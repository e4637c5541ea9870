"""Ulysses: an all-to-all turns rows of all heads into all rows of some heads, and back."""
# ruff: noqa: D102, Method documents the methods

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peer_methods.collectives import Messages, all_to_all
from benchmarks.peer_methods.differentiable import attend_whole, differentiate, record
from benchmarks.peer_methods.method import Method, count_scores
from benchmarks.peer_methods.views import heads_first, rows_first_view
from cqs.executors.distributed.transport.exchange import RowCopy, copy_rows
from cqs.partial import lse_dtype
from cqs.patterns import Pattern, per_head


class _AllToAll(NamedTuple):
    """An all-to-all in progress, with the buffers that it uses."""

    work: dist.Work | Messages
    packed: Tensor
    received: Tensor
    heads: list[int]

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received tensors, ``[batch, heads, seqlen, dim]``."""
        self.work.wait()
        return torch.split(heads_first(self.received.flatten(0, 1)), self.heads, dim=1)


class Ulysses(Method):
    """Every rank computes all tokens of some heads (Jacobs et al., arXiv 2309.14509).

    If there are fewer KV heads than ranks, they are repeated. The forward pass saves the exchanged
    tensors, so the backward pass sends gradients only. On a GPU one kernel packs all tensors of an
    exchange, and one unpacks each message.
    """

    def __init__(self, *arguments: Any, num_chunks: int = 1):
        """Also take the number of head chunks: one is sent while another is computed."""
        super().__init__(*arguments)
        self.num_chunks = num_chunks
        size = -(-len(self.heads) // self.num_ranks)
        self.heads = self.heads[self.rank * size : (self.rank + 1) * size]
        self.patterns = [self._pattern(chunk, size // num_chunks) for chunk in range(num_chunks)]

    @property
    def _sizes(self) -> tuple[torch.Size, int]:
        """Shape of the query, and number of KV heads."""
        return self.problem.query.shape, self.problem.key.shape[1]

    def _pattern(self, chunk: int, num_heads: int) -> Pattern | None:
        """Return the pattern of a head chunk of this rank."""
        pattern, first = self.problem.pattern, self._first(self.rank, chunk, num_heads)
        if pattern is None or not self.problem.differs_by_head:
            return pattern
        last = self.problem.query.shape[1] - 1  # padded heads have its pattern
        heads = range(first, first + max(num_heads, 1))
        return per_head([[pattern.head(0, min(head, last)) for head in heads]])

    def why_not(self) -> str | None:
        (_, num_heads, seqlen, _), num_kv_heads = self._sizes
        numbers = num_heads, max(num_kv_heads, self.num_ranks)
        if any(number % (self.num_ranks * self.num_chunks) for number in numbers):
            return (
                f"requires heads in multiples of {self.num_ranks * self.num_chunks}, "
                f"got {num_heads} query heads and {num_kv_heads} KV heads"
            )
        if num_kv_heads < self.num_ranks and self.num_ranks % num_kv_heads:
            return f"requires KV heads that divide {self.num_ranks} ranks, got {num_kv_heads}"
        if seqlen % self.num_ranks:
            return f"requires tokens in multiples of {self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        num_rows = seqlen // self.num_ranks
        return (range(self.rank * num_rows, (self.rank + 1) * num_rows),)

    def count_scores(self, compute: Callable[[], object]) -> int:
        return count_scores(self.problem, self.heads, [range(self.problem.query.shape[2])])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        times = max(self.num_ranks // key.shape[1], 1)
        tensors = [query, *(_repeat_heads(tensor, times) for tensor in (key, value))]
        incoming = [self._send_rows(tensors, chunk) for chunk in range(self.num_chunks)]
        saved, outgoing = [], []
        for transfer, pattern in zip(incoming, self.patterns, strict=True):
            attend = partial(attend_whole, self.problem, self.backend, pattern)
            output, kept = record(attend, *transfer.wait())
            outgoing.append(self._send_heads([output]))
            saved.append(kept)
        (output,) = self._receive(outgoing)
        return output, (saved, times)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        saved_chunks, times = saved
        incoming = [self._send_rows([grad_output], chunk) for chunk in range(self.num_chunks)]
        outgoing = []
        for transfer, kept in zip(incoming, saved_chunks, strict=True):
            outgoing.append(self._send_heads(differentiate(kept, *transfer.wait())))
        grad_query, *grads = self._receive(outgoing)
        return grad_query, *(_sum_heads(gradient, times) for gradient in grads)

    def _send_rows(self, tensors: Sequence[Tensor], chunk: int) -> _AllToAll:
        """Send every rank this shard's rows of its heads of a chunk; receive all tokens of ours."""
        heads = [tensor.shape[1] // (self.num_ranks * self.num_chunks) for tensor in tensors]
        num_rows = tensors[0].shape[2]
        schedule = [
            RowCopy(i, 0, rank * num_rows, num_rows, self._first(rank, chunk, heads[i]), *target)
            for i, target in enumerate(_places(heads))
            for rank in range(self.num_ranks)
        ]
        return self._exchange(tensors, heads, schedule, num_rows)

    def _send_heads(self, tensors: Sequence[Tensor]) -> _AllToAll:
        """Send every rank its rows of results for some heads; receive our rows of all heads."""
        heads, num_rows = [tensor.shape[1] for tensor in tensors], tensors[0].shape[2]
        schedule = [
            RowCopy(i, 0, 0, num_rows, 0, *target) for i, target in enumerate(_places(heads))
        ]
        return self._exchange(tensors, heads, schedule, num_rows // self.num_ranks)

    def _exchange(
        self,
        tensors: Sequence[Tensor],
        heads: list[int],
        schedule: Sequence[RowCopy],
        num_rows: int,
    ) -> _AllToAll:
        """Pack heads of tensors side by side, ``num_rows`` for each rank, and exchange them."""
        batch, *_, dim = tensors[0].shape
        packed = tensors[0].new_empty((self.num_ranks, num_rows, batch, sum(heads), dim))
        target = heads_first(packed.flatten(0, 1))
        copy_rows(tensors, [target] * len(tensors), tuple(schedule))
        received = torch.empty_like(packed)
        work = all_to_all(received, packed, self.group)
        return _AllToAll(work, packed, received, heads)

    def _first(self, rank: int, chunk: int, num_heads: int) -> int:
        """Return the first of the ``num_heads`` heads that a rank computes in a chunk."""
        return (rank * self.num_chunks + chunk) * num_heads

    def _receive(self, outgoing: Sequence[_AllToAll]) -> list[Tensor]:
        """Join the received rows of all heads."""
        received, heads = outgoing[0].received, outgoing[0].heads
        _, num_rows, batch, _, dim = received.shape
        targets = [
            heads_first(
                received.new_empty((num_rows, batch, self._first(self.num_ranks, 0, n), dim))
            )
            for n in heads
        ]
        for chunk, transfer in enumerate(outgoing):
            transfer.work.wait()
            schedule = [
                RowCopy(i, rank * num_rows, 0, num_rows, place, self._first(rank, chunk, n), n)
                for i, (place, n) in enumerate(_places(heads))
                for rank in range(self.num_ranks)
            ]
            source = heads_first(transfer.received.flatten(0, 1))
            copy_rows([source] * len(targets), targets, tuple(schedule))
        return targets


class PaddedUlysses(Ulysses):
    """Ulysses with heads of zeros up to a multiple of the ranks."""

    def why_not(self) -> str | None:
        (_, num_heads, seqlen, _), num_kv_heads = self._sizes
        if num_heads != num_kv_heads:
            return f"requires {num_heads} KV heads, got {num_kv_heads}"
        if num_heads % self.num_ranks == 0:
            return f"requires heads that {self.num_ranks} ranks do not divide, got {num_heads}"
        if seqlen % self.num_ranks:
            return f"requires tokens in multiples of {self.num_ranks}, got {seqlen}"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        num_heads = query.shape[1]
        output, saved = super().forward(*map(self._pad, (query, key, value)))
        return output[:, :num_heads], (saved, num_heads)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        of_padded, num_heads = saved
        gradients = super().backward(of_padded, self._pad(grad_output))
        return tuple(gradient[:, :num_heads] for gradient in gradients)

    def _pad(self, tensor: Tensor) -> Tensor:
        rows = rows_first_view(tensor)
        return heads_first(F.pad(rows, (0, 0, 0, -tensor.shape[1] % self.num_ranks)))


def _places(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first head of every tensor in a packed buffer, and its number of heads."""
    return [(sum(heads[:i]), number) for i, number in enumerate(heads)]


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    if times == 1:
        return tensor
    return heads_first(rows_first_view(tensor).repeat_interleave(times, dim=2))


def _sum_heads(tensor: Tensor, times: int) -> Tensor:
    """Add the gradients of repeated heads."""
    if times == 1:
        return tensor
    total: Tensor = tensor.unflatten(1, (-1, times)).sum(2, dtype=lse_dtype(tensor.dtype))
    return total.to(tensor.dtype)
