"""Load, check and construct interest sets: difference covers of the integers modulo W.

A set covers Z_W if every integer modulo W is a difference of two of its elements. With a cover of
m elements every task reads m / W of the tokens, so smaller covers reduce traffic and memory.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
from itertools import accumulate, count, islice
from pathlib import Path

from cqs.arguments import as_integer, as_text, to_integer

# The folder is next to the package in a source tree, and inside it in an installed wheel.
_FOLDERS = (
    Path(__file__).resolve().parents[2] / "interest_sets",
    Path(__file__).resolve().parents[1] / "interest_sets",
)

_ORDERS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31)
"""0, 1 and the prime powers q up to 31."""
PERFECT_MODULI = tuple(q * q + q + 1 for q in _ORDERS)
"""Numbers of tasks up to 1,000 with a perfect cover, in which every nonzero difference occurs once:
every task reads the fewest tokens possible for its number."""

MAX_NUM_TASKS = 2**18
"""Largest number of tasks; making its interest set and plan takes 1 to 2 s."""
_MAX_SIZE = 4096
"""Largest number of elements. The time of :func:`~cqs.scheduler.quorum.owner_offsets` is quadratic
in it; 650 elements are enough for ``MAX_NUM_TASKS``."""


def check_interest_set(interest_set: Iterable[int], num_tasks: int) -> tuple[int, ...]:
    """Return ``interest_set`` sorted if it is a difference cover modulo ``num_tasks``.

    Args:
        interest_set: At most 4,096 distinct integers in ``range(num_tasks)``, including 0.
        num_tasks: Number of tasks and of token groups, from 1 to 262,144.

    Raises:
        TypeError: ``interest_set`` is not a collection, or an element is not an integer.
        ValueError: ``num_tasks`` is out of range; an element is out of range or repeated; there
            are too many elements; 0 is missing; or a residue is not a difference of two elements
            (the message gives the smallest).

    Example:
        >>> check_interest_set([3, 0, 1], 7)
        (0, 1, 3)
    """
    num_tasks = as_integer("num_tasks", num_tasks, 1, MAX_NUM_TASKS)
    elements = list_elements(interest_set)
    for element in elements:
        if not 0 <= element < num_tasks:
            raise ValueError(f"interest_set must lie in range({num_tasks}), got {as_text(element)}")
    if len(set(elements)) != len(elements):
        raise ValueError(f"interest_set repeats an element: {elements}")
    if 0 not in elements:
        raise ValueError(f"interest_set must contain 0, got {elements}")
    if missing := missing_differences(elements, num_tasks):
        raise ValueError(
            f"interest_set {elements} is no difference cover modulo {num_tasks}: "
            f"no two elements differ by {missing[0]}"
        )
    return tuple(sorted(elements))


def list_elements(interest_set: Iterable[int]) -> tuple[int, ...]:
    """Return the elements of a collection of at most 4,096 integers.

    Raises:
        TypeError: ``interest_set`` is not a collection, or an element is not an integer.
        ValueError: ``interest_set`` has more than 4,096 elements.
    """
    if not isinstance(interest_set, Iterable) or getattr(interest_set, "shape", None) == ():
        raise TypeError(f"interest_set must be a collection of integers, got {interest_set!r}")
    elements = tuple(
        to_integer(element, "interest_set must hold integers")
        for element in islice(interest_set, _MAX_SIZE + 1)
    )
    if len(elements) > _MAX_SIZE:
        raise ValueError(f"interest_set must have at most {_MAX_SIZE} elements, got more")
    return elements


def load_interest_set(num_tasks: int) -> tuple[int, ...]:
    """Return the best known interest set for ``num_tasks``, after checking it.

    It is the first of :func:`load_interest_sets`.

    Example:
        >>> load_interest_set(7), load_interest_set(1)
        ((0, 1, 3), (0,))
        >>> len(load_interest_set(1000))
        40
    """
    return load_interest_sets(num_tasks)[0]


@cache
def load_interest_sets(num_tasks: int) -> tuple[tuple[int, ...], ...]:
    """Return all interest sets that are stored for ``num_tasks``, after checking them.

    For every number up to 111 they are optimal or the best published, and for 49 of these numbers
    there are several, which are equally large. For every number up to 300, and for larger numbers
    ``q*q + q + 1`` with a prime power q (the perfect difference sets of projective planes), one is
    stored at least. For others one is constructed, of at most ``sqrt(1.5 * num_tasks) + 6``
    elements.

    Args:
        num_tasks: Number of tasks and of token groups, from 1 to 262,144.

    Returns:
        Sorted difference covers of the integers modulo ``num_tasks`` that contain 0.

    Raises:
        TypeError: ``num_tasks`` is not an integer.
        ValueError: ``num_tasks`` is out of range, or a stored file is damaged.

    Example:
        >>> load_interest_sets(4)
        ((0, 1, 2), (0, 1, 3))
    """
    num_tasks = as_integer("num_tasks", num_tasks, 1, MAX_NUM_TASKS)
    for folder in _FOLDERS:
        if (path := folder / f"{num_tasks}.txt").is_file():
            return tuple(read_interest_sets(path, num_tasks))
    return (check_interest_set(ruler_cover(num_tasks), num_tasks),)


def read_interest_sets(path: Path, num_tasks: int) -> list[tuple[int, ...]]:
    """Return the interest sets of a file with one on each line, as the published collection has.

    Args:
        path: The file. Elements are separated by spaces or commas; empty lines are skipped.
        num_tasks: Number of tasks and of token groups.

    Raises:
        ValueError: A line is no difference cover, or there is none; the message gives its number.
    """
    interest_sets = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if words := line.replace(",", " ").split():
            try:
                interest_sets.append(check_interest_set(map(int, words), num_tasks))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not interest_sets:
        raise ValueError(f"{path} has no interest set")
    return interest_sets


def missing_differences(cover: Collection[int], modulus: int) -> list[int]:
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
    differences = {(a - b) % modulus for a in cover for b in cover}
    return [number for number in range(modulus) if number not in differences]


def prune_cover(cover: Iterable[int], modulus: int) -> tuple[int, ...]:
    """Remove redundant elements of a difference cover, largest first, and keep the smallest."""
    kept = sorted({element % modulus for element in cover})
    # The number of ordered pairs of elements with each difference.
    counts = Counter((a - b) % modulus for a in kept for b in kept)
    for element in reversed(kept[1:]):
        fewer = [other for other in kept if other != element]
        lost = Counter((element - other) % modulus for other in fewer)
        lost.update((other - element) % modulus for other in fewer)
        if all(counts[difference] > number for difference, number in lost.items()):
            kept = fewer
            counts.subtract(lost)
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
    r = next(r for r in count() if 24 * r * r + 36 * r + 13 >= modulus)
    gaps = (
        [1] * r
        + [r + 1]
        + [2 * r + 1] * r
        + [4 * r + 3] * (2 * r + 1)
        + [2 * r + 2] * (r + 1)
        + [1] * r
    )
    return prune_cover(accumulate(gaps, initial=0), modulus)
