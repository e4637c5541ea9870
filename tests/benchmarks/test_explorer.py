"""The interactive page: its data are those of the scheduler, and a browser draws them."""

from collections import Counter

import pytest

import cqs
from benchmarks.explorer import MOST_TASKS, make_data, write_script
from benchmarks.figures import EXPLORER_DATA, ROOT
from cqs.patterns import sliding_window

pytestmark = pytest.mark.long


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
