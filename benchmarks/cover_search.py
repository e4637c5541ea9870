"""Search difference covers by simulated annealing, as those of ``interest_sets/`` were found."""

import math
import random

from benchmarks.singer_covers import prime_power, translates_with_0_and_1


def least_size(modulus: int) -> int:
    """Return a lower bound of the elements of a difference cover.

    m elements have ``m (m - 1)`` differences besides 0. If these are exactly the residues besides
    0, the cover is a cyclic projective plane of order m - 1. Orders up to 2,000,000 are then prime
    powers (Gordon, Electronic Journal of Combinatorics 1, 1994).

    Args:
        modulus: Number of residues to cover, W, up to 10^12.

    Example:
        >>> [least_size(number) for number in (31, 32, 43)]
        [6, 7, 8]
    """
    size = next(m for m in range(math.isqrt(modulus), modulus + 1) if m * (m - 1) + 1 >= modulus)
    is_plane = size > 2 and size * (size - 1) + 1 == modulus
    return size + (is_plane and prime_power(size - 1) is None)


def search_cover(
    modulus: int, size: int, *, seed: int = 0, max_moves: int = 200_000
) -> tuple[int, ...] | None:
    """Search for a difference cover of ``size`` elements by simulated annealing.

    A move replaces one element, and the objective is the number of uncovered residues. Optimal
    covers for a few dozen tasks take seconds. The result depends only on the arguments.

    Args:
        modulus: Number of residues to cover, W.
        size: Number of elements of the cover.
        seed: Random seed.
        max_moves: Number of moves after which the search stops.

    Returns:
        A sorted cover that contains 0, or ``None`` if the search found none. ``None`` does not
        prove that no such cover exists.

    Example:
        >>> from cqs.scheduler.interest_sets import missing_differences
        >>> cover = search_cover(13, 4)
        >>> len(cover), missing_differences(cover, 13)
        (4, [])
    """
    if size * (size - 1) + 1 < modulus or size > modulus:
        return None
    rng = random.Random(seed)
    elements = [0, *rng.sample(range(1, modulus), size - 1)]
    counts = [0] * modulus
    for a in elements:
        for b in elements:
            counts[(a - b) % modulus] += 1
    uncovered = counts.count(0)

    def toggle(element: int, others: list[int], step: int) -> int:
        """Add (step = 1) or remove (step = -1) an element; return the change in coverage."""
        change = 0
        for other in others:
            for difference in ((element - other) % modulus, (other - element) % modulus):
                change += (counts[difference] == 0) if step == 1 else 0
                counts[difference] += step
                change -= (counts[difference] == 0) if step == -1 else 0
        return change

    for move in range(max_moves):
        if uncovered == 0:
            return min(translates_with_0_and_1(elements, modulus), default=tuple(sorted(elements)))
        temperature = 1.5 * (1 - move / max_moves) + 0.05
        position = rng.randrange(1, size)
        candidate = rng.randrange(1, modulus)
        if candidate in elements:
            continue
        removed = elements[position]
        others = elements[:position] + elements[position + 1 :]
        gained = toggle(removed, others, -1) + toggle(candidate, others, +1)
        if gained >= 0 or rng.random() < math.exp(gained / temperature):
            elements[position] = candidate
            uncovered -= gained
        else:
            toggle(candidate, others, -1)
            toggle(removed, others, +1)
    return None
