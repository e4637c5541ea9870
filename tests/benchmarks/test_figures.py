"""The figures that pages show are those that the rows give."""

import pytest

from benchmarks.figures import EXPLORER_DATA, FIGURES, ROOT, run
from benchmarks.tables import find_pages

pytestmark = pytest.mark.long


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
