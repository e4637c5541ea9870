"""The dropout mask: a function of seed, batch, head and positions, independent of tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cqs.problem.tensors import positions_of

_SMALLEST = -(2**63)
"""The smallest int64: XOR with it maps the order of unsigned integers to that of signed ones."""


class DropoutBits(NamedTuple):
    """Random 64-bit integers of queries and keys, which determine a random number of every pair.

    The number is the upper half of ``multiplier * key + increment`` modulo 2^64. For each query
    this is a hash from a family with pairwise independent values (Dietzfelbinger, "Universal
    hashing and k-wise independent random variables via integer arithmetic without primes", 1996).
    """

    multiplier: Tensor
    """Random bits of the queries, int64 ``[batch, num_heads, queries]``."""
    increment: Tensor
    """Further random bits of the queries, int64 ``[batch, num_heads, queries]``."""
    key: Tensor
    """Random bits of the keys, int64 ``[keys]``."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights after the softmax; the weights that stay are scaled up.

    The dropout mask is a function of seed, batch, head and the positions of query and key in the
    whole sequence. It does not depend on tasks, devices or kernels.
    """

    probability: float
    """Probability that a weight is zeroed, in [0, 1)."""
    seed: int
    """Random seed, in [0, 2^63)."""
    first_batch: int = 0
    """Index, in the whole batch, of the first batch element of the tensors at hand."""
    first_head: int = 0
    """Index, among all query heads, of the first head of the tensors at hand."""

    def moved(self, batch: int, head: int) -> "Dropout":
        """Return the dropout of tensors whose indices begin ``batch`` and ``head`` later."""
        return replace(
            self, first_batch=self.first_batch + batch, first_head=self.first_head + head
        )

    @property
    def threshold(self) -> int:
        """Pairs with a random number below it, in [0, 2^32), are dropped."""
        return min(round(self.probability * 2**32), 2**32 - 1)

    @property
    def scale(self) -> float:
        """Factor on the attention weights that stay."""
        return 1 / (1 - self.probability)

    def random_bits(
        self, like: Tensor, queries: Sequence[range], keys: Sequence[range]
    ) -> DropoutBits:
        """Return the random bits of queries and keys.

        Args:
            like: A tensor ``[batch, num_heads, ...]`` on the device of the result.
            queries: Positions of the queries, ascending.
            keys: Positions of the keys, ascending.
        """
        device = like.device
        batches = self.first_batch + torch.arange(like.shape[0], device=device).view(-1, 1, 1)
        heads = self.first_head + torch.arange(like.shape[1], device=device).view(-1, 1)
        rows, columns = (positions_of(ranges, device) for ranges in (queries, keys))
        streams = _draw(self.seed, torch.arange(3, device=device))
        # Multipliers and increments are drawn together: an operation takes the host 5 us.
        row_streams = _draw(_draw(_draw(streams[:2].view(-1, 1, 1, 1), batches), heads), rows)
        multiplier, increment = row_streams.unbind()
        return DropoutBits(multiplier, increment, _draw(streams[2], columns))

    def kept(self, bits: DropoutBits) -> Tensor:
        """Return the dropout mask, true for pairs that stay.

        Args:
            bits: The random bits of queries and keys. Those of queries may lack leading dimensions.

        Returns:
            bool ``[batch, num_heads, queries, keys]``, without the dimensions that the bits lack.
        """
        random = bits.multiplier.unsqueeze(-1) * bits.key
        random.add_(bits.increment.unsqueeze(-1)).bitwise_xor_(_SMALLEST)  # unsigned comparison
        return random >= self.threshold * 2**32 + _SMALLEST


def _draw(state: Tensor | int, number: Tensor) -> Tensor:
    """Return element ``number`` of the SplitMix64 sequence that starts at ``state``, int64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. int64
    arithmetic wraps around, as the unsigned arithmetic of the paper does. The constants are those
    of the paper reinterpreted as int64: 2^64 is subtracted from each.
    """
    # The sum is a new tensor, which the other operations change in place.
    z = (number + 1) * (0x9E3779B97F4A7C15 - 2**64) + state
    z = z.bitwise_xor_(_shift(z, 30)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    z = z.bitwise_xor_(_shift(z, 27)).mul_(0x94D049BB133111EB - 2**64)
    return z.bitwise_xor_(_shift(z, 31))


def _shift(number: Tensor, bits: int) -> Tensor:
    """Shift right logically: zeros enter from the left."""
    return (number >> bits).bitwise_and_(2 ** (64 - bits) - 1)
