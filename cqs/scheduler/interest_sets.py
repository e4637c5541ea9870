"""Load and check the interest set of a number of tasks."""

from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path

from cqs.arguments import as_integer, as_text, to_integer
from cqs.scheduler.difference_covers import missing_differences, ruler_cover

# The folder is next to the package in a source tree, and inside it in an installed wheel.
_FOLDERS = (
    Path(__file__).resolve().parents[2] / "interest_sets",
    Path(__file__).resolve().parents[1] / "interest_sets",
)

MAX_NUM_TASKS = 2**18
"""Largest number of tasks; making its interest set and plan takes 1 to 2 s."""
_MAX_SIZE = 4096
"""Largest number of elements. The time of :func:`~cqs.scheduler.quorum.pair_offsets` is quadratic
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
        to_integer(each, "interest_set must hold integers")
        for each in islice(interest_set, _MAX_SIZE + 1)
    )
    if len(elements) > _MAX_SIZE:
        raise ValueError(f"interest_set must have at most {_MAX_SIZE} elements, got more")
    return elements


@cache
def load_interest_set(num_tasks: int) -> tuple[int, ...]:
    """Return the best known interest set for ``num_tasks``, after checking it.

    It is the stored set, if there is one, and else a constructed set of at most ``sqrt(1.5 *
    num_tasks) + 6`` elements. Stored are sets for every number from 3 to 300, up to 111 optimal or
    the best published, and the perfect difference sets of projective planes for larger numbers
    ``q*q + q + 1`` with a prime power q.

    Args:
        num_tasks: Number of tasks and of token groups, from 1 to 262,144.

    Returns:
        A sorted difference cover of the integers modulo ``num_tasks`` that contains 0.

    Raises:
        TypeError: ``num_tasks`` is not an integer.
        ValueError: ``num_tasks`` is out of range, or a stored file is damaged.

    Example:
        >>> load_interest_set(7), load_interest_set(1)
        ((0, 1, 3), (0,))
        >>> len(load_interest_set(1000))
        40
    """
    num_tasks = as_integer("num_tasks", num_tasks, 1, MAX_NUM_TASKS)
    for folder in _FOLDERS:
        if (path := folder / f"{num_tasks}.txt").is_file():
            try:
                return check_interest_set(map(int, path.read_text().split()), num_tasks)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    return check_interest_set(ruler_cover(num_tasks), num_tasks)
