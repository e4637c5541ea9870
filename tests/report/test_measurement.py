"""Rows of measurements carry the load of the machine, and are written whole."""

import os
from dataclasses import replace

import pytest
from support.files import files_up_to

from cqs.report.measurement import Measurement, append_rows, format_rows, read_rows, summarize

ROW = Measurement("b", "c", "d", 1, "e", "f", 1.0, 1.0, 1.0, 1.0, 1, commit="")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def test_a_summary_has_spread_and_load():
    found = summarize([0.001, 0.002, 0.003, 0.004, 0.005])
    assert (found["p20_ms"], found["median_ms"], found["p80_ms"]) == pytest.approx((1.8, 3, 4.2))
    assert found["load_average"] >= 0 and found["num_cores"] >= 1
    assert summarize([0.5])["p20_ms"] == 500


@pytest.mark.parametrize(
    ("load", "warning"),
    [(9.9, "unreliable: load 9.9 on 2 cores"), (2.5, ""), (0.0, ""), (None, "")],
)
def test_rows_of_an_overloaded_machine_have_a_warning(load, warning):
    row = replace(ROW, load_average=load, num_cores=2)
    assert row.warning == warning
    lines = str(format_rows([ROW, row], {"by": lambda row: row.executor})).splitlines()
    assert lines[-1].split(maxsplit=1) == ["e", *([warning] if warning else [])]
    assert lines[2].strip() == "e"


def test_rows_of_earlier_versions_are_read(path):
    path.write_text('{"num_workers": 3}\n')
    assert read_rows(path, lambda row: [row]) == [{"num_tasks": 3}]
    append_rows([ROW], path)
    assert read_rows(path, lambda row: [row])[1]["load_average"] is None
    for content in ("[]\n", "[" * 100_000):
        path.write_text(content)
        with pytest.raises(ValueError, match="line 1"):
            read_rows(path, lambda row: [row])


def test_rows_that_do_not_fit_on_the_disk_are_not_begun(path):
    append_rows([ROW], path)
    before = path.read_bytes()
    with files_up_to(len(before) + 100), pytest.raises(OSError):
        append_rows([ROW, ROW], path)
    assert path.read_bytes() == before
    append_rows([ROW], path)
    assert len(path.read_bytes().splitlines()) == 2


def test_rows_of_several_processes_do_not_mix(path):
    children = []
    for name in "xyz":
        if (child := os.fork()) == 0:
            row = replace(ROW, benchmark=name * 9999)
            for _ in range(30):
                append_rows([row, row], path)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    names = read_rows(path, lambda row: [row["benchmark"]])
    assert sorted(names) == sorted(name * 9999 for name in "xyz" for _ in range(60))


def test_a_row_without_an_end_stays_a_row(path):
    append_rows([ROW], path)
    path.write_text(path.read_text().rstrip("\n"))
    append_rows([ROW, ROW], path)
    assert read_rows(path, lambda row: [row["case"]]) == ["c"] * 3
