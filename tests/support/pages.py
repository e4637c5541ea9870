"""The code in README.md and docs."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fence(NamedTuple):
    language: str
    code: str
    file: str | None
    """What the page says to save the code as."""
    output: str | None
    """What the page shows below."""


def fences(page):
    """The fenced code of a page; ``text`` that follows code at once is its output."""
    text = (ROOT / page).read_text()
    pattern = r"(?:`(?P<file>[\w.]+)`:\n\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```\n"
    pattern += r"(?:\n*```text\n(?P<output>.*?)^```\n)?"
    for found in re.finditer(pattern, text, re.M | re.S):
        yield Fence(*(found[name] for name in Fence._fields))


def joined(code):
    """The commands of a block, one a line, those that are continued in one."""
    return code.replace("\\\n", " ").splitlines()
