"""Lists and arrays of numbers, as arguments and in runs."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MOST = 2**20
"""Largest number of elements of a list argument, which may be an endless iterator."""


def as_list(name: str, values: Any) -> list[Any]:
    """Return the elements, up to 2**20, of an iterable or array as a list of Python numbers."""
    try:
        elements = values.tolist() if hasattr(values, "tolist") else values
        listed = list(islice(elements, _MOST + 1))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}") from None
    if len(listed) > _MOST:
        raise ValueError(f"{name} must have at most {_MOST} elements")
    return listed


def adjacent_runs(numbers: ArrayLike) -> Iterator[tuple[int, int]]:
    """Yield first and last of the runs of adjacent integers among ascending ones."""
    array = np.asarray(numbers, dtype=np.int64)
    for run in np.split(array, np.flatnonzero(np.diff(array) > 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1])


def as_array(values: Any) -> NDArray[Any]:
    """Convert lists, NumPy arrays or tensors on any device to a NumPy array.

    Tensors of dtypes that NumPy lacks, such as bfloat16, become float32.
    """
    if isinstance(values, range):
        values = as_list("an array", values)
    if not hasattr(values, "detach"):
        return np.asarray(values)
    values = values.detach().cpu()
    try:
        return np.asarray(values)
    except TypeError:
        return np.asarray(values.float())
