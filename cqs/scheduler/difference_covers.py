"""Check and construct difference covers of the integers modulo W.

A set covers Z_W if every integer modulo W is a difference of two of its elements. With a cover of
m elements every task reads m / W of the tokens, so smaller covers reduce traffic and memory.
"""

from collections.abc import Iterable
from itertools import accumulate

_ORDERS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31)
"""0, 1 and the prime powers q up to 31."""
PERFECT_MODULI = tuple(q * q + q + 1 for q in _ORDERS)
"""Numbers of tasks up to 1,000 with a perfect cover, in which every nonzero difference occurs once:
every task reads the fewest tokens possible for its number."""


def missing_differences(cover: Iterable[int], modulus: int) -> list[int]:
    """Return the residues that are not a difference of two elements of ``cover``, ascending.

    Args:
        cover: Integers, taken modulo ``modulus``.
        modulus: Positive integer W.

    Example:
        >>> missing_differences((0, 1, 3), 7)
        []
        >>> missing_differences((0, 1, 2), 7)
        [3, 4]
    """
    # Bit i of an integer stands for residue i, so a shift adds one number to all residues.
    elements = {element % modulus for element in cover}
    bits = sum(1 << element for element in elements)
    reached = 0
    for element in elements:
        reached |= bits >> element | bits << (modulus - element)
    digits = f"{reached:0{modulus}b}"[: -modulus - 1 : -1]
    return [number for number, digit in enumerate(digits) if digit == "0"]


def prune_cover(cover: Iterable[int], modulus: int) -> tuple[int, ...]:
    """Remove redundant elements of a difference cover, largest first, and keep the smallest."""
    kept = sorted({element % modulus for element in cover})
    counts = [0] * modulus  # counts[d]: ordered pairs of elements whose difference is d
    for a in kept:
        for b in kept:
            counts[(a - b) % modulus] += 1
    for element in reversed(kept[1:]):
        fewer = [other for other in kept if other != element]
        lost = [(element - other) % modulus for other in fewer]
        lost += [-difference % modulus for difference in lost]
        for difference in lost:
            counts[difference] -= 1
        if all(counts[difference] for difference in lost):
            kept = fewer
        else:
            for difference in lost:
                counts[difference] += 1
    return tuple(kept)


def ruler_cover(modulus: int) -> tuple[int, ...]:
    """Construct a difference cover of at most ``sqrt(1.5 * modulus) + 6`` elements.

    The marks of a Wichmann ruler measure every length up to L, and so every residue modulo any
    ``modulus <= 2 L + 1`` (Colbourn and Ling, "Quorums from difference covers", Information
    Processing Letters 75, 2000). Elements that are redundant for ``modulus`` are removed.

    Example:
        >>> ruler_cover(12)
        (0, 1, 4, 6)
    """
    r = 0
    while 24 * r * r + 36 * r + 13 < modulus:
        r += 1
    gaps = (
        [1] * r
        + [r + 1]
        + [2 * r + 1] * r
        + [4 * r + 3] * (2 * r + 1)
        + [2 * r + 2] * (r + 1)
        + [1] * r
    )
    return prune_cover(accumulate(gaps, initial=0), modulus)
