"""The loop: tokens come, a block meets them, its result goes back, all three at a time."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cqs.streaming.plan import START, Block, Position, StreamPlan, Visit
from cqs.streaming.sources import Source, Target
from cqs.streaming.transfers import Transfers, make_transfers


class Side(NamedTuple):
    """Tensors of one side of the problem."""

    sources: tuple[Source, ...]
    """Each ``[batch, heads, tokens, columns]``."""
    has_key_heads: bool


class Reduction(Protocol):
    """What becomes of a block while tokens stream past."""

    def add(self, visit: Visit, held: Sequence[Tensor], streamed: Sequence[Tensor]) -> None:
        """Launch what a visit computes; tensors are ``[1, heads, tokens, columns]``.

        ``streamed`` is empty where nothing meets the block.
        """

    def finish(self, held: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of the block, ``[1, heads, tokens, columns]``, all its own."""


def stream(
    plan: StreamPlan,
    device: torch.device,
    held: Side,
    streamed: Side,
    reduction: Reduction,
    targets: Sequence[Target],
    *,
    start: Position = START,
    visited: Callable[[Visit], None] = lambda visit: None,
    finished: Callable[[Block], None] = lambda block: None,
) -> None:
    """Carry out a plan.

    Args:
        plan: What meets what, and when.
        device: Where.
        held: The side that blocks are of.
        streamed: The other.
        reduction: What is computed.
        targets: Where each of its results goes.
        start: What is final already.
        visited: Called when a visit was launched.
        finished: Called when the results of a block are where they go.
    """
    with (
        torch.autocast(device.type, enabled=False),  # dtypes are the caller's
        closing(make_transfers(device)) as transfers,
    ):
        blocks = _Inbox(transfers, plan, held, min(plan.rows, plan.num_held), device)
        chunks = _Inbox(transfers, plan, streamed, min(plan.chunk, plan.num_streamed), device)
        leaving: tuple[Block, list[Callable[[], None]]] | None = None

        def order(visit: Visit) -> None:
            blocks.order(visit.block, visit.block.tokens)
            if visit.tokens is not None:
                chunks.order(visit.block, visit.tokens)

        def send(block: Block, results: Sequence[Tensor]) -> list[Callable[[], None]]:
            mark = transfers.mark()
            return [
                transfers.download(
                    result[0],
                    mark,
                    target,
                    block.batch,
                    block.heads if result.shape[1] == len(block.heads) else block.kv_heads,
                    block.tokens,
                )
                for result, target in zip(results, targets, strict=True)
            ]

        def arrive() -> None:
            nonlocal leaving
            if leaving is not None:
                (block, waits), leaving = leaving, None
                for wait in waits:
                    wait()
                finished(block)

        visits = plan.visits(start)
        current = next(visits, None)
        if current is not None:
            order(current)
        while current is not None:
            own, others = blocks.take(), chunks.take() if current.tokens is not None else []
            reduction.add(current, own, others)
            visited(current)
            if current.is_last:
                arrive()
                leaving = current.block, send(current.block, reduction.finish(own))
            blocks.give_back()
            chunks.give_back()
            current = next(visits, None)
            if current is not None:
                order(current)
        arrive()


class _Inbox:
    """Room on the device for tokens of one side, several times: some come while others are used."""

    def __init__(
        self,
        transfers: Transfers,
        plan: StreamPlan,
        side: Side,
        num_tokens: int,
        device: torch.device,
    ):
        """Allocate room for so many tokens of a group of heads."""
        self._transfers, self._side = transfers, side
        num_heads = plan.heads_at_once * (1 if side.has_key_heads else plan.group_size)
        self._room = [
            [
                torch.empty(
                    (num_heads, num_tokens, source.shape[3]), dtype=source.dtype, device=device
                )
                for source in side.sources
            ]
            for _ in range(plan.num_buffers)
        ]
        self._contents: list[Any] = [None] * plan.num_buffers
        self._arrived: list[Any] = [None] * plan.num_buffers
        self._used: list[Any] = [transfers.mark()] * plan.num_buffers  # the room may be second-hand
        self._current = 0

    def order(self, block: Block, tokens: range) -> None:
        """Let tokens of the heads of a block come, unless they are there."""
        heads = block.kv_heads if self._side.has_key_heads else block.heads
        wanted = block.batch, heads, tokens
        if wanted in self._contents:
            self._current = self._contents.index(wanted)
            return
        self._current = here = (self._current + 1) % len(self._contents)
        for source, room in zip(self._side.sources, self._room[here], strict=True):
            self._arrived[here] = self._transfers.upload(
                source, block.batch, heads, tokens, room[:, : len(tokens)], self._used[here]
            )
        self._contents[here] = wanted

    def take(self) -> list[Tensor]:
        """Return the tokens ordered last, ``[1, heads, tokens, columns]``."""
        self._transfers.wait(self._arrived[self._current])
        _, _, tokens = self._contents[self._current]
        return [room[None, :, : len(tokens)] for room in self._room[self._current]]

    def give_back(self) -> None:
        """Note that what was launched so far is the last that uses what was taken."""
        self._used[self._current] = self._transfers.mark()
