"""Which pairs dropout keeps: a function of seed and position, whoever computes the pair."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST = -(2**63)


class DropoutWords(NamedTuple):
    """Random 64-bit words of queries and keys, from which every pair draws its lot.

    The lot is the upper half of ``multiplier * key + increment`` modulo 2^64: for each query a
    member of a family of hashes whose values are pairwise independent (Dietzfelbinger, "Universal
    hashing and k-wise independent random variables via integer arithmetic without primes", 1996).
    """

    multiplier: Tensor
    """int64 ``[batch, num_heads, queries]``."""
    increment: Tensor
    """Likewise."""
    key: Tensor
    """int64 ``[keys]``."""


@dataclass(frozen=True)
class Dropout:
    """After the softmax each probability is zeroed with this chance, or else scaled up.

    Which ones depends on seed, batch, head and the positions of query and key in the whole
    sequence: not on tasks, devices or kernels.
    """

    probability: float
    """In [0, 1)."""
    seed: int
    """Less than 2^63."""
    first_batch: int = 0
    """Where the tensors at hand are some of a larger batch: the number of their first element."""
    first_head: int = 0
    """Likewise."""

    def moved(self, batch: int, head: int) -> "Dropout":
        """Return the same dropout for tensors that begin so many batch elements and heads later."""
        return replace(
            self, first_batch=self.first_batch + batch, first_head=self.first_head + head
        )

    @property
    def threshold(self) -> int:
        """Lots below it, of 2^32, are dropped."""
        return min(round(self.probability * 2**32), 2**32 - 1)

    @property
    def scale(self) -> float:
        """Factor on the probabilities that stay."""
        return 1 / (1 - self.probability)

    def words(self, like: Tensor, queries: Sequence[range], keys: Sequence[range]) -> DropoutWords:
        """Return the words of queries and keys at these positions.

        Args:
            like: ``[batch, num_heads, ...]``, on the device that they go to.
            queries: Positions, ascending.
            keys: Likewise.
        """
        device = like.device
        batches = self.first_batch + torch.arange(like.shape[0], device=device).view(-1, 1, 1)
        heads = self.first_head + torch.arange(like.shape[1], device=device).view(-1, 1)
        rows, columns = (
            torch.cat([torch.arange(r.start, r.stop, device=device) for r in ranges])
            for ranges in (queries, keys)
        )
        streams = torch.arange(3, device=device)
        multiplier, increment, key = (_draw(self.seed, stream) for stream in streams)
        return DropoutWords(
            _draw(_draw(_draw(multiplier, batches), heads), rows),
            _draw(_draw(_draw(increment, batches), heads), rows),
            _draw(key, columns),
        )

    def kept(self, words: DropoutWords) -> Tensor:
        """Say which pairs stay.

        Returns:
            bool ``[batch, num_heads, queries, keys]``, or without the dimensions that the words of
            queries do not have.
        """
        lots = words.multiplier.unsqueeze(-1) * words.key
        lots.add_(words.increment.unsqueeze(-1)).bitwise_xor_(_SMALLEST)  # as if without a sign
        return lots >= self.threshold * 2**32 + _SMALLEST


def _draw(state: Tensor | int, number: Tensor) -> Tensor:
    """Return the word of a number in the sequence that starts at a state.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), in
    the arithmetic of int64, which wraps.
    """
    word = state + (number + 1) * _signed(0x9E3779B97F4A7C15)
    word = (word ^ _shift(word, 30)) * _signed(0xBF58476D1CE4E5B9)
    word = (word ^ _shift(word, 27)) * _signed(0x94D049BB133111EB)
    return word ^ _shift(word, 31)


def _shift(word: Tensor, bits: int) -> Tensor:
    """Shift to the right without regard to the sign."""
    shifted: Tensor = (word >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(word: int) -> int:
    """Return the int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word
