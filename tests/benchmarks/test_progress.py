"""Bars appear on terminals, after two seconds, and nowhere else."""

import io
import sys

import pytest

from benchmarks import timing


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "delay", "is_shown", "appears"),
    [
        (Terminal, 0, True, True),
        (Terminal, 60, True, False),
        (Terminal, 0, False, False),
        (io.StringIO, 0, True, False),
    ],
)
def test_a_bar_appears(monkeypatch, stream, delay, is_shown, appears):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(timing, "_DELAY", delay)
    assert list(timing.track("abc", 3, "label", is_shown=is_shown)) == list("abc")
    assert ("label" in sys.stderr.getvalue()) == appears
