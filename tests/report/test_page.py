"""A report is one page, which says in words and pictures what its rows say."""

import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pytest
from markupsafe import escape
from scaling_rows import make_rows

from cqs.report.page import write_report
from cqs.report.sections import MEMORY, QUANTITIES, SHARES, SPEEDUP, TIMES, TRAFFIC

pytestmark = pytest.mark.slow

HOSTILE = "</td><script>document.title = 'owned'</script><img src=x onerror=alert(1)> *a* | `b`"
WORKERS = (1, 2, 7, 8, 31, 111)
REPORTS = {
    "local": [*make_rows(WORKERS), *make_rows((1, 7), passes="backward")],
    "ray": make_rows((1, 3, 31), executor="ray", is_causal=True),
    "pattern": make_rows((111,), pattern="sliding_window(256, 0) | global_tokens(4)"),
    "hostile": [replace(row, device=HOSTILE, commit=HOSTILE) for row in make_rows((1,))],
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The text of each report."""
    found = {}
    for name, rows in REPORTS.items():
        directory = tmp_path_factory.mktemp(name)
        write_report(rows, directory)
        found[name] = (directory / "report.html").read_text()
    return found


class Elements(HTMLParser):
    """The elements of a page: pairs of a name and attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REPORTS)
def test_nothing_leaves_the_page_and_every_picture_is_there(pages, name):
    """Nothing is requested but the page, or run."""
    elements = Elements(pages[name]).found
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert policy in [attributes.get("content") for _, attributes in elements]
    assert "script" not in dict(elements) and not re.search(r"url\(|@import", pages[name])
    for tag, attributes in elements:
        assert not any(key.startswith("on") for key in attributes)
        loaded = [attributes.get(key, "data:") for key in ("src", "href") if tag != "a"]
        assert all(address.startswith("data:") for address in loaded)
    pictures = [attributes for tag, attributes in elements if tag == "img"]
    assert len(pictures) >= 6
    for picture in pictures:
        data = base64.b64decode(picture["src"].partition("base64,")[2])
        assert plt.imread(io.BytesIO(data)).shape[1] > 300 and picture["alt"].strip()


def test_the_page_tells_its_structure(pages):
    text = pages["local"]
    title = "Attention over 8,192 tokens, W = 1, 2, 7, 8, 31, 111"
    assert '<html lang="en">' in text and f"<title>{title}</title>" in text
    assert re.findall("<h1>(.*)</h1>", text) == [title]
    assert re.findall("<h[23]>", text)[:2] == ["<h2>", "<h3>"]
    assert text.count("<table>") == text.count("<caption>")
    assert all("scope=" in header for header in re.findall(r"<th\b[^>]*>", text))
    rows = re.findall('<th scope="row">(.*)</th>', text)
    assert set(rows) == {str(number) for number in WORKERS}


def test_the_page_has_every_number_and_no_foreign_markup(pages):
    assert escape(HOSTILE) in pages["hostile"]
    for name, rows in REPORTS.items():
        sections = [SHARES, *[MEMORY, TRAFFIC, TIMES, SPEEDUP] * len({row.passes for row in rows})]
        assert pages[name].count("<table>") == len(sections)
        assert pages[name].count("<img ") == len(sections) + len({row.num_tasks for row in rows})
        for row in rows:
            assert f"<td>{QUANTITIES['ms'](row)}</td>" in pages[name]


def test_the_page_opens_with_findings_and_the_partition(pages):
    text = pages["local"]
    opening = text[text.index("</h1>") : text.index("<table>")]
    assert re.findall(r"<li>(.*)</li>", opening) == [
        "Memory: with 111 tasks, a task holds at most 7.1 MiB, 10.9 % of the peak of the whole "
        "problem as one task.",
        "Speed-up: 111 devices would take 12.6 ms for the forward pass in 111 tasks, and one "
        "device 1,200 ms for one task: 95.1 times as fast (ratio of the medians).",
        "Merge: 7.93 % of the time for 111 tasks merges their results.",
    ]
    assert opening.index("</ul>") < opening.index("<img ") < opening.index("111 tasks</figcaption>")
