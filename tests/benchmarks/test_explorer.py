"""The interactive page: its data are those of the scheduler, and a browser draws them."""

import re
import shutil
from collections import Counter

import pytest

import cqs
from benchmarks.explorer import MOST_TASKS, make_data, write_script
from benchmarks.figures import EXPLORER_DATA, ROOT
from cqs.patterns import sliding_window

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


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
        for costs in each["costs"].values():
            assert {"cqs", "ring", "all-gather"} <= costs.keys()
            assert all(received >= 0 and peak > 0 for received, peak in costs.values())


@pytest.fixture
def page(tmp_path):
    """The page without its frame."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    text = (ROOT / "docs/explorer.md").read_text()
    (fragment,) = re.findall(r"```\{raw\} html\n(.*?)```", text, re.DOTALL)
    folder = (ROOT / EXPLORER_DATA).parent
    style = '<meta name="viewport" content="width=device-width">'
    style += f'<link rel="stylesheet" href="{folder}/pages.css">'
    file = tmp_path / "explorer.html"
    file.write_text(style + fragment.replace("../_static", str(folder)))
    complaints = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(file.as_uri())
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
    assert not complaints


def test_a_browser_draws_every_choice(page):
    assert "Task 0 of 7 reads groups 0, 1, 3: 42.9 %" in page.locator("#explorer-text").inner_text()
    cells = "[...document.getElementById('explorer-matrix').getContext('2d').getImageData"
    cells += "(2, 2, 1, 1).data].join()"
    assert page.evaluate(cells) == "0,114,178,255"
    assert page.locator("#explorer-wheel line").count() == 3
    page.fill("input[name=tasks]", "13")
    page.fill("input[name=task]", "12")
    assert "Task 12 of 13 reads groups" in page.locator("#explorer-text").inner_text()
    assert page.locator("#explorer-wheel circle").count() == 14
    for number in (31, 2, 1):
        page.fill("input[name=tasks]", str(number))
        task = min(12, number - 1)
        assert f"Task {task} of {number} " in page.locator("#explorer-text").inner_text()
