"""Rows of measurements carry the load of the machine, and tables name overloaded ones."""

from dataclasses import replace

import pytest

from cqs.report.measurement import Measurement, append_rows, format_rows, read_rows, summarize

ROW = Measurement("b", "c", "d", 1, "e", "f", 1.0, 1.0, 1.0, 1.0, 1)


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


def test_rows_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"num_workers": 3}\n')
    assert read_rows(path, lambda row: [row]) == [{"num_tasks": 3}]
    append_rows([ROW], str(path))
    assert read_rows(path, lambda row: [row])[1]["load_average"] is None
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1"):
        read_rows(path, lambda row: [row])
