"""Content of a report: chapters of sections, each with a table and pictures."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cqs.scheduler import Plan

NOTHING = "-"
"""Text of a quantity that was not measured."""

Show = Callable[[Any], str]
"""Function that formats a quantity of a row."""
Plot = Callable[[Any, Any], Any]
"""Function that plots rows on matplotlib axes."""


class RowAxis(NamedTuple):
    """The quantity that distinguishes the rows of a table."""

    header: str
    """Header of the first column."""
    name: str
    """Name of the quantity in text."""
    show: Show
    """Formats the quantity of a row."""


class Section(NamedTuple):
    """A table with its explanation and pictures."""

    title: str
    text: str
    columns: dict[str, Show]
    """Formatting functions of the columns after the first, by header."""
    pictures: dict[str, Plot]
    """Plots of the rows of a chapter, by caption."""


class Chapter(NamedTuple):
    """Sections about the same rows."""

    title: str
    axis: RowAxis
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
    """The content of a page."""

    title: str
    method: str
    facts: dict[str, str]
    """Problem, machine, versions and other facts, by name."""
    command: str
    """Shell command that repeats the measurements."""
    chapters: Sequence[Chapter]
    plans: Sequence[Plan] = ()
    """Plans whose score matrices are drawn, coloured by owner."""


def span(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest of some integers as text.

    Example:
        >>> span([49000, 10000, 20000]), span([7, 7])
        ('10,000 to 49,000', '7')
    """
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)}))
