"""The rounds of a pass: receive, compute, return, merge, free.

Ranks compute in this order, and :class:`cqs.scheduler.held_bytes.HeldBytes` counts in it, so the
bytes that are predicted are those that are held.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

from cqs.scheduler.task import Step

QUERIES, KEYS = 0, 1
BOTH = ((QUERIES, KEYS),)
_Rows = TypeVar("_Rows")


class Round(NamedTuple, Generic[_Rows]):
    """What a device receives, computes and returns at a time."""

    routes: tuple[_Rows, _Rows]
    """The rows that it exchanges of queries, and of keys."""
    receives: tuple[tuple[int, ...], ...] = BOTH
    """For every exchange before the computation, the sides of which tokens are received."""
    returns: tuple[tuple[int, ...], ...] = BOTH
    """For every exchange after it, the sides of which results are returned and tokens freed."""
    steps: tuple[Step, ...] = ()
    """The steps to compute."""


class ChunkRounds(Generic[_Rows]):
    """The rounds of a head chunk in a pass.

    In a round, a device receives tokens, computes with all tokens that it holds, and sends results
    back for those that it then frees. While it computes, the tokens of the next round of a batch
    are in transit.
    """

    def __init__(self, rounds: Sequence[Round[_Rows]]) -> None:
        """Take the rounds."""
        self.rounds = rounds
        self._coming: Any = None
        self._returning: Any = None

    def receive(self) -> None:
        """Begin to receive the tokens of the first round."""
        self._coming = self.fetch(self.rounds[0], self.rounds[0].receives[0])

    def run(self) -> None:
        """Run all rounds; the results of the last may still be in transit."""
        for current, following in zip_longest(self.rounds, self.rounds[1:]):
            for sides in current.receives:
                self.hold(sides, self._coming or self.fetch(current, sides))
                self._coming = None
            if following is not None and len(following.receives) == 1:
                self._coming = self.fetch(following, following.receives[0])
            self.compute(current)
            for sides in current.returns:
                self._merge_returned()
                if (transfer := self.free(current, sides)) is not None:
                    self._returning = transfer, sides, current
            if len(current.returns) > 1:  # the end of a batch
                self._merge_returned()

    def finish(self) -> None:
        """Merge what was returned last, and write the results of the shard."""
        self._merge_returned()

    def _merge_returned(self) -> None:
        if self._returning is not None:
            returning, self._returning = self._returning, None
            self.merge(*returning)

    def compute_own(self) -> None:
        """Compute what requires no tokens of other devices, if it is separate."""

    def fetch(self, current: Round[_Rows], sides: tuple[int, ...]) -> Any:
        """Begin to receive the tokens of some sides; return a transfer."""
        raise NotImplementedError

    def hold(self, sides: tuple[int, ...], transfer: Any) -> None:
        """Wait for tokens and hold them."""
        raise NotImplementedError

    def compute(self, current: Round[_Rows]) -> None:
        """Compute a round with the tokens held."""
        raise NotImplementedError

    def free(self, current: Round[_Rows], sides: tuple[int, ...]) -> Any:
        """Free the tokens of some sides, begin to return their results, and return a transfer."""
        raise NotImplementedError

    def merge(self, transfer: Any, sides: tuple[int, ...], current: Round[_Rows]) -> None:
        """Wait for results for the shard, and add them to others."""
        raise NotImplementedError


Chunk = TypeVar("Chunk", bound=ChunkRounds[Any])


def run_chunks(
    chunks: Iterable[Chunk],
    num_turns: int | None,
    on_stream: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    allocate: Callable[[], object] | None = None,
) -> list[Chunk]:
    """Run a pass.

    Args:
        chunks: Its head chunks.
        num_turns: Number of chunks that are in transit at a time: the tokens of some while others
            are computed. Results are merged at the end. With ``None``, a chunk is made when those
            before are finished and freed.
        on_stream: Returns the context in which a chunk runs, given its index.
        allocate: Allocates what is required only when results are merged, outside of any context;
            not called if chunks follow one another.

    Returns:
        The chunks, unless they follow one another.
    """
    if num_turns is None:
        for chunk in chunks:
            chunk.run()
            chunk.finish()
        return []
    chunks = list(chunks)
    for i, chunk in enumerate(chunks[:num_turns]):
        with on_stream(i):
            chunk.receive()
    for i, chunk in enumerate(chunks):
        with on_stream(i):
            if i == 0:  # overlaps the exchange of the first head chunk
                chunk.compute_own()
            chunk.run()
        if (following := i + num_turns) < len(chunks):
            with on_stream(following):
                chunks[following].receive()
    for i, chunk in enumerate(chunks[1:], 1):  # overlaps the last results
        with on_stream(i):
            chunk.compute_own()
    if allocate is not None:
        allocate()
    for i, chunk in enumerate(chunks):
        with on_stream(i):
            chunk.finish()
    return chunks
