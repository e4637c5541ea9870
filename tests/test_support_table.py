"""Every cell of the tables in docs/pattern-support.md says what happens."""

import pytest
from support_table import CELLS, format_tables, page_tables, read_tables, run

WRITTEN = read_tables(page_tables())


@pytest.mark.slow
@pytest.mark.sample(15)
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_says_what_happens(cell):
    assert run(cell) == WRITTEN[cell]


def test_the_tables_are_as_they_are_written():
    assert set(WRITTEN) == set(CELLS)
    assert format_tables(WRITTEN) == page_tables()
