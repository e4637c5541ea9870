"""What a page says: chapters of sections, each a table and its pictures."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cqs.scheduler import Plan

NOTHING = "-"
"""Shown of what was not measured."""

Show = Callable[[Any], str]
"""Writes a quantity of a row."""


class Picture(NamedTuple):
    """A picture of the rows of a chapter."""

    plot: Callable[[Any, Any], Any]
    """Takes rows and matplotlib axes."""
    caption: str


class TableAxis(NamedTuple):
    """What tells the rows of a table apart."""

    header: str
    name: str
    show: Show


class Section(NamedTuple):
    """A question, its answer in numbers and in pictures."""

    title: str
    text: str
    columns: dict[str, Show]
    """Header of a column and what it shows of a row, after what the row is of."""
    pictures: tuple[Picture, ...]


class Chapter(NamedTuple):
    """Sections about the same rows."""

    title: str
    axis: TableAxis
    rows: Sequence[Any]
    sections: tuple[Section, ...]

    def table(self, section: Section) -> list[list[str]]:
        """Return the header and a line for each row, without columns that no row has."""
        cells = {name: [show(row) for row in self.rows] for name, show in section.columns.items()}
        columns = [
            [self.axis.header, *map(self.axis.show, self.rows)],
            *([name, *column] for name, column in cells.items() if set(column) != {NOTHING}),
        ]
        return [list(line) for line in zip(*columns, strict=True)]


class Content(NamedTuple):
    """A page, before it is drawn."""

    title: str
    method: str
    facts: dict[str, str]
    """What was measured, where and how, by name."""
    command: str
    """Measures the same again."""
    chapters: Sequence[Chapter]
    plans: Sequence[Plan] = ()
    """Of which the score matrices are shown, in the colours of their owners."""


def span(numbers: Sequence[int]) -> str:
    """Write the least and the largest of some integers.

    Example:
        >>> span([49000, 10000, 20000]), span([7, 7])
        ('10,000 to 49,000', '7')
    """
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))
