"""Budgets of lines, parameters and words: an excess of each kind is found."""

import pytest

from tests.support import budgets
from tests.support.budgets import Budget, Excess, find_excesses

SOURCE = '''"""A module."""

from typing import TypedDict, Unpack


class Options(TypedDict):
    first: int
    second: int  # a comment


def compute(
    query, key, *, scale=1.0, **options: Unpack[Options]
):
    """Compute."""
    return query


def _private(a, b, c, d, e, f):
    return a
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one module of 10 lines with 5 parameters, and a page of three words."""
    monkeypatch.setattr(budgets, "BUDGETS", {"cqs/nn": Budget(10, 10, 5)})
    monkeypatch.setattr(budgets, "MOST_WORDS", {"docs": 3})
    for path, text in {"cqs/nn/layer.py": SOURCE, "docs/page.md": "# One two\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "added", "excesses"),
    [
        ("cqs/nn/layer.py", "x = 1\n", [("lines of code", 11), ("lines of its largest file", 11)]),
        ("cqs/nn/other.py", "x = 1\n", [("lines of code", 11)]),
        ("cqs/nn/layer.py", "# only a comment\n\n", []),
        ("docs/more.md", "Word.\n", [("words", 4)]),
    ],
)
def test_an_excess_is_named(project, path, added, excesses):
    with (project / path).open("a") as file:
        file.write(added)
    assert [(found.what, found.count) for found in find_excesses(project)] == excesses


def test_a_parameter_too_many_is_named(project):
    path = project / "cqs/nn/layer.py"
    path.write_text(path.read_text().replace("scale=1.0,", "scale=1.0, seed=0,"))
    assert find_excesses(project) == [Excess("cqs/nn", "parameters of a public function", 6, 5)]
