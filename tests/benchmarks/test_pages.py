"""What pages show is what rows and plans give: tables, figures and the interactive page."""

from collections import Counter

import pytest

import cqs
from benchmarks.explorer import MOST_TASKS, make_data, write_script
from benchmarks.figures import EXPLORER_DATA, FIGURES, ROOT, run
from benchmarks.result_tables import TABLES
from benchmarks.tables import find_pages, table_names, update
from cqs.patterns import sliding_window

pytestmark = pytest.mark.long


def test_all_tables_are_up_to_date():
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


def test_all_figures_are_drawn_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.figures.ROOT", tmp_path)
    for path in (*FIGURES, EXPLORER_DATA):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    run(None)
    pages = "".join(page.read_text() for page in find_pages())
    for path in FIGURES:
        assert (tmp_path / path).stat().st_size > 5000
        assert (ROOT / path).exists(), "run python -m benchmarks figures"
        assert path.rpartition("/")[2] in pages


def test_the_data_are_those_of_the_plans():
    assert (ROOT / EXPLORER_DATA).read_text() == write_script(), "run python -m benchmarks figures"
    data = make_data()
    assert list(data["tasks"]) == [*range(1, MOST_TASKS + 1)]
    for number, each in data["tasks"].items():
        tokens = data["groups"] * number
        for kind, owners in each["owners"].items():
            assert len(owners) == tokens**2
            options = {"is_causal": kind == "causal"}
            if kind == "window":
                width = max(tokens // 8, 1)
                options["pattern"] = sliding_window(width, width)
            plan = cqs.make_plan(tokens, num_tasks=number, **options)
            pairs = {data["letters"][task.index]: task.live_pairs for task in plan.tasks}
            assert Counter(owners.replace(".", "")) == Counter(pairs)
