"""Rows that ``cqs bench --out`` wrote: one JSON object in each line."""

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


def read_result_rows(path: str, pick: Callable[[Any], Iterable[_T]]) -> list[_T]:
    """Return what is picked from each row, together.

    Args:
        path: Of the file.
        pick: Takes a row, and raises LookupError, TypeError or ValueError where it is none.

    Raises:
        ValueError: if a line is no such row; names it.
    """
    found: list[_T] = []
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                found += pick(json.loads(line))
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
    return found
