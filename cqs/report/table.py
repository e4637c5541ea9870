"""Right-aligned text tables, and texts of numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out a table with a rule under its header.

    Example:
        >>> print(format_table(["worker", "share"], [[0, "14.3 %"]]))
        worker   share
        ------  ------
             0  14.3 %
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def tabulate(items: Iterable[Item], columns: Mapping[str, Callable[[Item], object]]) -> str:
    """Lay out a table with a line for each item.

    Args:
        items: The items.
        columns: Header of each column, and a function that returns an item's cell.
    """
    return format_table(
        list(columns), [[show(item) for show in columns.values()] for item in items]
    )


def percent(share: float) -> str:
    """Write a share with three digits: ``42.9 %``."""
    return f"{100 * share:.3g} %"


def mebibytes(number: float) -> str:
    """Write bytes in MiB: ``13.9``."""
    return f"{number / 2**20:.1f}"


def digits(number: float) -> str:
    """Return a number with three significant digits as text.

    Example:
        >>> [digits(number) for number in (0.0123, 1.5, 2345.6)]
        ['0.0123', '1.50', '2,346']
    """
    size = abs(number)
    if size < 1e-4:
        return "0"
    decimals = next((n for n, least in enumerate((100, 10, 1, 0.1)) if size >= least), 4)
    return f"{number:,.{decimals}f}"
