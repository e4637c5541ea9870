"""Write the tables of results into the pages, from the rows in ``benchmarks/results``.

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.result_tables import TABLES

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^<!-- table: (\S+) -->\n(?:.*?\n)??<!-- end -->$", re.MULTILINE | re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no options."""


def run(options: argparse.Namespace) -> None:
    """Write all tables of all pages; print the pages that have changed."""
    for page in find_pages():
        text = page.read_text()
        updated = update(text, TABLES)
        if updated != text:
            page.write_text(updated)
            print(page.relative_to(ROOT))


def find_pages() -> list[Path]:
    """Return the pages that may have tables."""
    pages = [*(ROOT / "docs").rglob("*.md")]
    return [ROOT / "README.md", *sorted(pages), ROOT / "interest_sets/README.md"]


def table_names(text: str) -> list[str]:
    """Return the names of the tables of a page."""
    return [found[1] for found in _BLOCK.finditer(text)]


def update(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return the text of a page with its tables generated again.

    Args:
        text: The page.
        tables: Name of a table -> function that returns its Markdown.

    Raises:
        ValueError: The page names an unknown table.
    """

    def generate(found: re.Match[str]) -> str:
        if found[1] not in tables:
            raise ValueError(f"table must be one of {', '.join(sorted(tables))}; got {found[1]!r}")
        return f"<!-- table: {found[1]} -->\n{tables[found[1]]()}\n<!-- end -->"

    return _BLOCK.sub(generate, text)
