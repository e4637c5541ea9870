"""The rows of a sequence that a worker holds."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HeldTokens:
    """Contiguous pieces of one ``[batch, heads, seqlen, dim]`` sequence, by token range.

    Example:
        >>> held = HeldTokens([(range(0, 2), torch.zeros(1, 1, 2, 4)),
        ...                    (range(6, 9), torch.ones(1, 1, 3, 4))])
        >>> held.take([range(1, 2), range(7, 9)])[0, 0, :, 0]
        tensor([0., 1., 1.])
    """

    def __init__(self, pieces: Iterable[tuple[range, Tensor]]):
        """Hold ``(token range, tensor)`` pieces; the tensors are never written to."""
        self._pieces = sorted(pieces, key=lambda piece: piece[0].start)

    def take(self, ranges: Iterable[range]) -> Tensor:
        """Return the tokens of ``ranges`` in order: a view if one piece holds them all.

        Raises:
            KeyError: if a token is not held.
        """
        found = [part for tokens in ranges for part in self._find(tokens)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def _find(self, tokens: range) -> Iterable[Tensor]:
        start = tokens.start
        for held, tensor in self._pieces:
            if held.start <= start < held.stop:
                stop = min(held.stop, tokens.stop)
                yield tensor[:, :, start - held.start : stop - held.start]
                start = stop
                if start == tokens.stop:
                    return
        raise KeyError(f"tokens {start}..{tokens.stop} are not held")
