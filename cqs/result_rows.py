"""Rows that ``python -m benchmarks NAME --out`` wrote: one JSON object in each line."""

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from cqs.input_files import read_lines

_T = TypeVar("_T")
_RENAMED = {"num_workers": "num_tasks"}
"""Names of fields in rows of earlier commits, and their names today."""


def parse_row(line: str | bytes) -> Any:
    """Return the JSON object of a line, with today's names of fields."""
    row = json.loads(line)
    if not isinstance(row, dict):
        return row
    return {_RENAMED.get(name, name): value for name, value in row.items()}


def read_result_rows(path: str, pick: Callable[[Any], Iterable[_T]]) -> list[_T]:
    """Return what is picked from each row, together.

    Args:
        path: Of the file.
        pick: Takes a row, and raises LookupError, TypeError or ValueError where it is none.

    Raises:
        ValueError: if it is no regular file of at most 64 MiB, or a line is no such row; names it.
    """
    found: list[_T] = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            found += pick(parse_row(line))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    return found
