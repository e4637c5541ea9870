"""A report opens in a browser, from disk alone, on a desk and on a phone."""

import re
import shutil
from dataclasses import replace

import pytest
from markupsafe import escape
from scaling_rows import make_rows

from cqs.report.page import write_report
from cqs.report.sections import MEMORY, QUANTITIES, SHARES, SPEEDUP, TIMES, TRAFFIC

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</td><script>document.title = 'owned'</script><img src=x onerror=alert(1)> *a* | `b`"
WORKERS = (1, 2, 7, 8, 31, 111)
REPORTS = {
    "local": [*make_rows(WORKERS), *make_rows((1, 7), passes="backward")],
    "ray": make_rows((1, 3, 31), executor="ray", is_causal=True),
    "pattern": make_rows((111,), pattern="sliding_window(256, 0) | global_tokens(4)"),
    "hostile": [replace(row, device=HOSTILE, commit=HOSTILE) for row in make_rows((1,))],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The directory of each report."""
    found = {}
    for name, rows in REPORTS.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_report(rows, found[name])
    return found


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # Chromium's own sandbox needs a user other than root.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("local", 1280, "light"),
        ("ray", 390, "light"),
        ("pattern", 390, "dark"),
        ("hostile", 390, "light"),
    ],
)
def test_nothing_leaves_the_page_and_every_picture_is_there(browser, reports, name, width, scheme):
    """Nothing is requested but the page, complained of or run."""
    requests, complaints = [], []
    size = {"width": width, "height": 800}
    page = browser.new_page(viewport=size, color_scheme=scheme, offline=True)
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.goto((reports[name] / "report.html").as_uri())
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    pictures = page.locator("img")
    assert pictures.count() >= 6
    for picture in pictures.all():
        assert picture.evaluate("each => each.decode().then(() => each.naturalWidth)") > 300
        assert picture.get_attribute("alt").strip()
    assert [url for url in requests if not url.startswith("data:")] == [page.url]
    assert not complaints
    page.close()


def test_the_page_tells_its_structure(reports):
    text = (reports["local"] / "report.html").read_text()
    title = "Attention over 8,192 tokens, W = 1, 2, 7, 8, 31, 111"
    assert '<html lang="en">' in text and f"<title>{title}</title>" in text
    assert re.findall("<h1>(.*)</h1>", text) == [title]
    assert re.findall("<h[23]>", text)[:2] == ["<h2>", "<h3>"]
    assert text.count("<table>") == text.count("<caption>")
    assert all("scope=" in header for header in re.findall(r"<th\b[^>]*>", text))
    rows = re.findall('<th scope="row">(.*)</th>', text)
    assert set(rows) == {str(number) for number in WORKERS}


def test_the_page_without_a_browser_has_every_number_and_no_foreign_markup(reports):
    text = {name: (path / "report.html").read_text() for name, path in reports.items()}
    assert "<script" not in text["hostile"] and escape(HOSTILE) in text["hostile"]
    for name, rows in REPORTS.items():
        sections = [SHARES, *[MEMORY, TRAFFIC, TIMES, SPEEDUP] * len({row.passes for row in rows})]
        assert text[name].count("<table>") == len(sections)
        assert text[name].count("<img ") == len(sections) + len({row.num_tasks for row in rows})
        for row in rows:
            assert f"<td>{QUANTITIES['ms'](row)}</td>" in text[name]


def test_the_page_opens_with_findings_and_the_partition(reports):
    text = (reports["local"] / "report.html").read_text()
    opening = text[text.index("</h1>") : text.index("<table>")]
    assert re.findall(r"<li>(.*)</li>", opening) == [
        "Memory: with 111 tasks, a task holds at most 7.1 MiB, 10.9 % of the peak of the whole "
        "problem as one task.",
        "Speed-up: 111 devices would take 12.6 ms for the forward pass in 111 tasks, and one "
        "device 1,200 ms for one task: 95.1 times as fast (ratio of the medians).",
        "Merge: 7.93 % of the time for 111 tasks merges their results.",
    ]
    assert opening.index("</ul>") < opening.index("<img ") < opening.index("111 tasks</figcaption>")
