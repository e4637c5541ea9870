"""Storage of the tokens of a sequence that a worker holds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class HeldTokens:
    """Ascending token ranges of one ``[batch, heads, seqlen, dim]`` sequence.

    Example:
        >>> held = HeldTokens(torch.arange(5).view(1, 1, 5, 1), (range(0, 2), range(6, 9)))
        >>> held.take([range(1, 2), range(7, 9)]).flatten()
        tensor([1, 3, 4])
    """

    tensor: Tensor | None
    """All tokens, one range after another, if they are in one tensor."""
    ranges: tuple[range, ...]
    """Token ranges that are held, ascending."""
    parts: Sequence[Tensor] | None = None
    """The tokens of every range; ``None`` until they are needed."""

    @classmethod
    def whole(cls, tensor: Tensor) -> "HeldTokens":
        """Hold a whole sequence."""
        return cls(tensor, (range(tensor.shape[2]),))

    def split(self) -> Sequence[Tensor]:
        """Return the tokens of every range."""
        if self.parts is None:
            assert self.tensor is not None
            self.parts = self.tensor.split(list(map(len, self.ranges)), dim=2)
        return self.parts

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tokens that are held."""
        return sum(part.nbytes for part in self.split())

    @property
    def sample(self) -> Tensor:
        """Return a tensor of some tokens, with the dtype, device and all dimensions except seqlen.

        Raises:
            KeyError: No tokens are held.
        """
        if not self.ranges:
            raise KeyError("no tokens are held")
        return self.split()[0] if self.tensor is None else self.tensor

    def joined(self) -> Tensor:
        """Return all tokens in one tensor; several are copied once, and the copy is kept."""
        if self.tensor is None:
            parts = self.split()
            self.tensor = parts[0] if len(parts) == 1 else join_rows(parts)
        return self.tensor

    def empty_like(self, part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor like ``part`` with one row (dim 2) for each held token."""
        batch, heads, _, *dim = part.shape
        return part.new_empty((batch, heads, sum(map(len, self.ranges)), *dim), dtype=dtype)

    def take(self, ranges: Iterable[range]) -> Tensor:
        """Return the tokens of ``ranges`` in order: a view if one tensor holds them, else a copy.

        Raises:
            KeyError: A token is not held.
        """
        parts = list[Tensor]()
        if len(self.ranges) == 1 and self.tensor is not None:
            self.parts = [self.tensor]
        held_parts = self.parts or self.split()
        for tokens in ranges:
            start = tokens.start
            for held, tensor in zip(self.ranges, held_parts, strict=True):
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
        if len(parts) == 1:
            return parts[0]
        return join_rows(parts) if parts[0].is_cuda else torch.cat(parts, dim=2)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors ``[batch, heads, rows, ...]`` one after another in dim 2.

    An H200 copies elements of 16 bytes in half of the time of those of 2; a CPU gains nothing.
    """
    if all(map(_is_wide, parts)):
        wide = torch.cat([part.view(torch.complex128) for part in parts], dim=2)
        return wide.view(parts[0].dtype)
    return torch.cat(list(parts), dim=2)


def _is_wide(rows: Tensor) -> bool:
    """Return whether rows ``[batch, heads, rows, dim]`` on a GPU are aligned units of 16 bytes."""
    if not rows.is_cuda or rows.ndim != 4 or rows.stride(3) != 1 or rows.data_ptr() % 16:
        return False
    size, numbers = 16 // rows.element_size(), (*rows.stride()[:3], rows.storage_offset())
    return not any(number % size for number in (*numbers, rows.shape[3]))
