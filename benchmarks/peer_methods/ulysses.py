"""Heads for rows, and back."""
# ruff: noqa: D102, what methods do stands in Method

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.alone import attend_alone, differentiate_alone
from benchmarks.peer_methods.calls import join_chunks
from benchmarks.peer_methods.method import Method
from benchmarks.peer_methods.views import heads_first, rows_first_view
from cqs.partial import lse_dtype
from cqs.problem import Problem


class _Transfer(NamedTuple):
    """An exchange under way, and what must live as long."""

    work: dist.Work
    packed: Tensor
    received: Tensor
    heads: list[int]

    def wait(self) -> tuple[Tensor, ...]:
        """Return what came, as ``[batch, heads, seqlen, dim]``."""
        self.work.wait()
        return torch.split(heads_first(self.received.flatten(0, 1)), self.heads, dim=1)


class Ulysses(Method):
    """A rank computes all tokens of some heads (Jacobs et al., arXiv 2309.14509).

    Fewer key heads than ranks are repeated. The backward pass starts from what the ranks held, so
    that only gradients travel.
    """

    def __init__(self, *arguments: Any, num_parts: int = 1, **options: Any):
        """Also take into how many parts to cut the heads: of one heads travel beside another."""
        super().__init__(*arguments, **options)
        self.num_parts = num_parts

    def why_not(self, problem: Problem) -> str | None:
        (_, num_heads, seqlen, _), num_kv_heads = problem.query.shape, problem.key.shape[1]
        numbers = num_heads, max(num_kv_heads, self.num_ranks)
        if any(number % (self.num_ranks * self.num_parts) for number in numbers):
            return (
                f"needs heads in multiples of {self.num_ranks * self.num_parts}, "
                f"got {num_heads} of queries and {num_kv_heads} of keys"
            )
        if num_kv_heads < self.num_ranks and self.num_ranks % num_kv_heads:
            return f"needs key heads that divide {self.num_ranks} ranks, got {num_kv_heads}"
        if seqlen % self.num_ranks:
            return f"needs tokens in multiples of {self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return join_chunks([self.rank], seqlen // self.num_ranks)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        times = max(self.num_ranks // key.shape[1], 1)
        tensors = [query, *(_repeat_heads(tensor, times) for tensor in (key, value))]
        coming = [self._send_rows(tensors, part) for part in range(self.num_parts)]
        saved, going = [], []
        for transfer in coming:
            held = transfer.wait()
            answer = attend_alone(self.worker, *held, is_causal=self.is_causal)
            going.append(self._send_heads([answer.output]))
            saved.append((*held, *answer))
        (output,) = self._receive(going)
        return output, (saved, times)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        parts, times = saved
        coming = [self._send_rows([grad_output], part) for part in range(self.num_parts)]
        going = []
        for transfer, held in zip(coming, parts, strict=True):
            (grad,) = transfer.wait()
            found = differentiate_alone(self.worker, held, grad, is_causal=self.is_causal)
            going.append(self._send_heads(found))
        grad_query, *grads = self._receive(going)
        return grad_query, *(_sum_heads(gradient, times) for gradient in grads)

    def _send_rows(self, tensors: Sequence[Tensor], part: int) -> _Transfer:
        """Send every rank the rows of a part of its heads; all tokens of ours come."""
        pieces = [self._heads_of_ranks(tensor)[:, :, :, part].movedim(2, 0) for tensor in tensors]
        return self._exchange(pieces)

    def _send_heads(self, tensors: Sequence[Tensor]) -> _Transfer:
        """Send every rank its rows of what was computed of some heads; those of all heads come."""
        ranks = self.num_ranks, -1
        return self._exchange([rows_first_view(tensor).unflatten(0, ranks) for tensor in tensors])

    def _exchange(self, pieces: Sequence[Tensor]) -> _Transfer:
        """Send tensors ``[ranks, rows, batch, heads, dim]``, joined at the heads."""
        heads = [piece.shape[3] for piece in pieces]
        packed = pieces[0].new_empty((*pieces[0].shape[:3], sum(heads), pieces[0].shape[4]))
        for target, piece in zip(packed.split(heads, dim=3), pieces, strict=True):
            target.copy_(piece)
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, packed, group=self.group, async_op=True)
        return _Transfer(work, packed, received, heads)

    def _receive(self, going: Sequence[_Transfer]) -> list[Tensor]:
        """Put together the rows that come home, of all heads."""
        received = going[0].received
        _, *sizes, _, head_dim = received.shape
        targets = [
            received.new_empty((*sizes, self.num_ranks * self.num_parts * heads, head_dim))
            for heads in going[0].heads
        ]
        for part, transfer in enumerate(going):
            transfer.work.wait()
            pieces = transfer.received.split(transfer.heads, dim=3)
            for target, piece in zip(targets, pieces, strict=True):
                of_part = self._heads_of_ranks(heads_first(target))[:, :, :, part]
                of_part.copy_(piece.movedim(0, 2))
        return list(map(heads_first, targets))

    def _heads_of_ranks(self, tensor: Tensor) -> Tensor:
        """View a shard as ``[rows, batch, ranks, parts, heads, dim]``."""
        view: Tensor = rows_first_view(tensor).unflatten(2, (self.num_ranks, self.num_parts, -1))
        return view


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
