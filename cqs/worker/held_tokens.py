"""Storage of the tokens of a sequence that a worker holds."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class HeldTokens:
    """Contiguous parts of one ``[batch, heads, seqlen, dim]`` sequence, by token range.

    Example:
        >>> held = HeldTokens([(range(0, 2), torch.zeros(1, 1, 2, 4)),
        ...                    (range(6, 9), torch.ones(1, 1, 3, 4))])
        >>> held.take([range(1, 2), range(7, 9)])[0, 0, :, 0]
        tensor([0., 1., 1.])
    """

    def __init__(self, pieces: Iterable[tuple[range, Tensor]]):
        """Hold pairs of a token range and a tensor ``[batch, heads, len(range), dim]``."""
        self._pieces = list(pieces)
        """The pairs, ascending; empty until they are needed if one tensor holds all tokens."""
        if len(self._pieces) > 1:
            self._pieces.sort(key=lambda piece: piece[0].start)
        self.ranges: tuple[range, ...] = next(zip(*self._pieces, strict=True), ())
        """Token ranges that are held, ascending."""
        self._joined = self._pieces[0][1] if len(self._pieces) == 1 else None

    @classmethod
    def whole(cls, tensor: Tensor) -> "HeldTokens":
        """Hold a whole sequence."""
        return cls(((range(tensor.shape[2]), tensor),))

    @classmethod
    def packed(cls, tensor: Tensor, ranges: Sequence[range]) -> "HeldTokens":
        """Hold the tokens of ascending ranges, stored in one tensor one after another."""
        held = cls([(ranges[0], tensor)] if len(ranges) == 1 else [])
        held.ranges, held._joined = tuple(ranges), tensor
        return held

    def _split(self) -> list[tuple[range, Tensor]]:
        """Return the pairs of a range and a tensor."""
        if not self._pieces and self._joined is not None:
            parts = self._joined.split(list(map(len, self.ranges)), dim=2)
            self._pieces = list(zip(self.ranges, parts, strict=True))
        return self._pieces

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tokens that are held."""
        return sum(tensor.nbytes for _, tensor in self._split())

    @property
    def sample(self) -> Tensor:
        """Return a tensor of some tokens, with the dtype, device and all dimensions except seqlen.

        Raises:
            KeyError: No tokens are held.
        """
        if not self.ranges:
            raise KeyError("no tokens are held")
        if self._joined is not None:
            return self._joined
        return self._pieces[0][1]

    def joined(self) -> Tensor:
        """Return all tokens in one tensor; several are copied once, and the copy is kept."""
        if self._joined is None:
            self._joined = torch.cat([tensor for _, tensor in self._pieces], dim=2)
        return self._joined

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """Return zeros ``[batch, heads, held tokens, ...]`` of this dtype."""
        batch, heads, _, *dim = self.sample.shape
        return self.sample.new_zeros((batch, heads, sum(map(len, self.ranges)), *dim), dtype=dtype)

    def empty_like(self, part: Tensor) -> Tensor:
        """Return an uninitialised tensor like ``part`` with one row (dim 2) for each held token."""
        batch, heads, _, *dim = part.shape
        return part.new_empty((batch, heads, sum(map(len, self.ranges)), *dim))

    def take(self, ranges: Iterable[range]) -> Tensor:
        """Return the tokens of ``ranges`` in order: a view if one tensor holds them, else a copy.

        Raises:
            KeyError: A token is not held.
        """
        parts, pieces = [], self._pieces or self._split()
        for tokens in ranges:
            start = tokens.start
            for held, tensor in pieces:
                if held == tokens:
                    parts.append(tensor)
                    break
                if held.start <= start < held.stop:
                    stop = min(held.stop, tokens.stop)
                    parts.append(tensor[:, :, start - held.start : stop - held.start])
                    start = stop
                    if start == tokens.stop:
                        break
            else:
                raise KeyError(f"tokens {start}..{tokens.stop} are not held")
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
