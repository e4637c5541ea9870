"""Reader of result rows: JSON lines written by ``python -m benchmarks NAME --out``."""

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from cqs.input_files import read_lines

_T = TypeVar("_T")
_RENAMED = {"num_workers": "num_tasks"}
"""Former names of fields and their current names."""


def parse_row(line: str | bytes) -> Any:
    """Return the JSON object of a line, with the current names of fields."""
    row = json.loads(line)
    if not isinstance(row, dict):
        return row
    return {_RENAMED.get(name, name): value for name, value in row.items()}


def read_result_rows(path: str, pick: Callable[[Any], Iterable[_T]]) -> list[_T]:
    """Return the values that ``pick`` extracts from the rows of a file.

    Args:
        path: Path of the JSON lines file.
        pick: Called with each row; returns its values, or raises LookupError, TypeError or
            ValueError for a malformed row.

    Raises:
        ValueError: The path is not a regular file of at most 64 MiB, or a row is malformed; the
            message gives its line.
    """
    found: list[_T] = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            found += pick(parse_row(line))
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    return found
