"""The tables of results in the pages are those that the rows give."""

import pytest

from benchmarks.result_tables import TABLES
from benchmarks.tables import find_pages, table_names, update

pytestmark = pytest.mark.long


def test_all_tables_are_up_to_date(each_fit_once):
    texts = {page: page.read_text() for page in find_pages()}
    stale = [page for page, text in texts.items() if update(text, TABLES) != text]
    assert not stale, "run python -m benchmarks tables"
    used = [name for text in texts.values() for name in table_names(text)]
    assert sorted(used) == sorted(TABLES), "every table is in one page"


def test_only_tables_are_replaced():
    page = "a\n<!-- table: x -->\n| old |\n<!-- end -->\nb\n<!-- table: x -->\n<!-- end -->\n"
    new = "<!-- table: x -->\n| new |\n<!-- end -->\n"
    assert update(page, {"x": lambda: "| new |"}) == f"a\n{new}b\n{new}"
    with pytest.raises(ValueError, match="'x'"):
        update(page, {"y": lambda: ""})
