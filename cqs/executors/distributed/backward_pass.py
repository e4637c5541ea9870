"""One head chunk of a rank's task in a backward pass."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cqs.executors.distributed.chunk_pass import ChunkPass, by_heads, narrow, place_results
from cqs.executors.distributed.layout import HeadChunk, Layout
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.transport.exchange import Transfer, by_route
from cqs.partial import Gradients, lse_dtype, sum_rows
from cqs.scheduler.rounds import QUERIES, Round


class BackwardPass(ChunkPass):
    """Computes the gradients of this rank's shard."""

    def __init__(
        self, *fields: Any, gradients: Callable[[], Gradients], kept: Sequence[Tensor]
    ) -> None:
        """Prepare a backward pass.

        Args:
            *fields: Those of :class:`ChunkPass`.
            gradients: Returns gradients of this rank's shard, all heads; written to. Its first call
                allocates them.
            kept: Tensors that the forward pass of the chunk kept.
        """
        super().__init__(*fields)
        self._held = [*kept[:1]], [*kept[1:3]]
        self._gradients, self._final = gradients, kept[3:]
        self._results: tuple[list[Tensor], list[Tensor]] = [], []
        """Gradients of the tokens held, of queries and of keys."""
        self._sums: list[dict[range, tuple[Tensor, Tensor]]] = []
        """For each gradient and range of heads, its place and its sum, if parts are added."""
        if self.layout.is_bounded:
            for gradient, heads in zip(gradients(), self.chunk.heads, strict=True):
                places = {group: narrow(gradient, group) for group in dict.fromkeys(heads)}
                self._sums.append({group: (part, _sum_of(part)) for group, part in places.items()})

    def compute(self, current: Round[Route]) -> None:
        """Add the gradients of a round to those of the tokens held."""
        (query, *_), keys = self._held
        if not current.steps:
            for side in chain(*current.returns):
                if not self._results[side]:  # no rows
                    self._results[side].extend(map(torch.empty_like, ([query], keys)[side]))
            return
        self._held[QUERIES].extend(self._final)
        dtype = None if self.layout.is_bounded else query.dtype
        tokens = self._held_tokens(current)
        gradients = self._worker.run_backward(current.steps, *tokens, dtype=dtype)
        for results, tensors in zip(self._results, (gradients[:1], gradients[1:]), strict=True):
            for total, tensor in zip(results, tensors, strict=False):
                total += tensor
            results += tensors[len(results) :]

    def free(self, current: Round[Route], sides: tuple[int, ...]) -> Transfer:
        """Free tokens, and send their gradients to the owners in the dtype of the query."""
        results, routes, dtype = list[Tensor](), list[Route](), self._sent[QUERIES][0].dtype
        for side in sides:
            self._held[side].clear()
            results += [gradient.to(dtype) for gradient in self._results[side]]
            routes += [current.routes[side]] * len(self._results[side])
            self._results[side].clear()
        return self._exchange.send(self.chunk.index, results, routes)

    def add(self, received: list[Tensor], sides: tuple[int, ...], current: Round[Route]) -> None:
        """Add gradients that ranks sent back for this rank's shard.

        Without a limit of memory one exchange brings all of them, and their sum is written. With a
        limit every exchange brings those of one side, and :meth:`finish` writes the sum.
        """
        if not self.layout.is_bounded:
            add_gradients(self._gradients(), received, self.layout, self.chunk)
            return
        (side,) = sides  # QUERIES = 0: that of query; KEYS = 1: those of key and value, 1 and 2
        for number, tensor in enumerate(received, side):
            groups = by_heads(current.routes[side], self.chunk.heads[number])
            for heads, places in groups.items():
                total = self._sums[number][heads][1]
                for part, rows in places:
                    total[:, :, rows] += tensor[:, :, part]

    def finish(self) -> None:
        """Write the gradients, and free their sums."""
        super().finish()
        while self._sums:
            for place, total in self._sums.pop().values():
                if total is not place:
                    place.copy_(total)


def _sum_of(place: Tensor) -> Tensor:
    """Return zeros to add gradients to: the place itself if its dtype is wide enough."""
    dtype = lse_dtype(place.dtype)
    return place if place.dtype == dtype else place.new_zeros(place.shape, dtype=dtype)


def add_gradients(
    gradients: Gradients, received: Sequence[Tensor], layout: Layout, chunk: HeadChunk
) -> None:
    """Write the sum of the received gradients of each row and head into this rank's gradients.

    Args:
        gradients: This rank's gradients; written to.
        received: Gradients that other ranks sent back.
        layout: The rank's work and routing tables.
        chunk: The heads of the gradients.
    """
    heads = chunk.heads
    for route, chosen in by_route(received, layout.routes):
        # One rank alone has the gradient of a row and head: of final queries, or of its own heads.
        once = [
            n for n in chosen if layout.is_final and n == 0 or len({*heads[n]}) == len(heads[n])
        ]
        targets, sent = [gradients[n] for n in once], [received[n] for n in once]
        place_results(targets, sent, [heads[n] for n in once], route, 0)
        for n in set(chosen).difference(once):
            for group, places in by_heads(route, heads[n]).items():
                parts = [(received[n][:, :, part], rows) for part, rows in places]
                sum_rows(narrow(gradients[n], group), parts)
