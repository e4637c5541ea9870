"""Tables for the terminal, and texts of numbers."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Table:
    """A header and at least one row of cells.

    ``str`` lays them out as plain text, with a rule under the header; words are aligned left,
    numbers right.

    Example:
        >>> print(Table(["worker", "share"], [["first", "14.3 %"], ["second", "9 %"]]))
        worker   share
        ------  ------
        first   14.3 %
        second     9 %
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        cells = [list(self.header), *([str(cell) for cell in row] for row in self.rows)]
        columns = [_format_column(*column) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _format_column(header: str, *cells: str) -> list[str]:
    width = max(map(len, (header, *cells)))
    pad = str.ljust if _has_words(cells) else str.rjust
    return [pad(text, width) for text in (header, "-" * width, *cells)]


def _has_words(cells: Iterable[object]) -> bool:
    return any(str(cell)[:1].isalpha() for cell in cells)


def tabulate(items: Iterable[Item], columns: Mapping[str, Callable[[Item], object]]) -> Table:
    """Return a table with a row for each item.

    Args:
        items: The items.
        columns: Header of each column, and a function that returns an item's cell.
    """
    return Table(list(columns), [[cell(item) for cell in columns.values()] for item in items])


def show(content: object) -> None:
    """Print a text or a table.

    On a terminal the library rich, if installed, folds headers of a table that is wider. Pipes,
    dumb terminals and ``NO_COLOR`` get the same words as plain text.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    has_rich = importlib.util.find_spec("rich") is not None
    if sys.stdout.isatty() and not is_plain and has_rich and isinstance(content, Table):
        content = _draw(content)
    print(content)


def _draw(table: Table) -> str:
    """Return a table as rich draws it on this terminal, or as plain text if it is too wide."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(markup=False, highlight=False, emoji=False)
    cells = [[str(cell) for cell in column] for column in zip(*table.rows, strict=True)]
    for headers in ([[name] for name in table.header], [name.split() for name in table.header]):
        widths = [
            max(map(len, [*names, *column])) for names, column in zip(headers, cells, strict=True)
        ]
        if sum(widths) + 2 * len(widths) <= console.width:
            break
    else:
        return str(table)
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name, column, width in zip(table.header, cells, widths, strict=True):
        drawn.add_column(name, justify="left" if _has_words(column) else "right", width=width)
    for row in zip(*cells, strict=True):
        drawn.add_row(*row)
    with console.capture() as captured:
        console.print(drawn, end="")
    return captured.get().rstrip("\n")


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
