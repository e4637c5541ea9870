"""Fits find the machine that rows were measured on."""

import json

import pytest

from benchmarks.fitting import MeasuredTime, fit, read_rows
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import predict
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import Workload

pytestmark = pytest.mark.long


def test_a_fit_finds_the_machine_that_rows_are_of():
    hidden = Machine(500e12, 390e12, per_row=1e-9, bandwidth=110e9, latency=60e-6)
    rows = []
    for tokens in (8192, 32768, 131072):
        case = Workload(tokens, AttentionShape(16, 128))
        for method in ("cqs", "cqs quorums", "ring", "all-gather", "ulysses"):
            for passes in ("forward", "backward"):
                seconds = predict(method, case, 8, hidden, passes).seconds
                rows.append(MeasuredTime(method, case, 8, passes, seconds))
    found = fit(tuple(rows))
    for name in ("rate", "backward_rate", "per_row", "bandwidth", "latency"):
        assert getattr(found, name) == pytest.approx(getattr(hidden, name), rel=0.05)
    assert all(row.ratio(found) == pytest.approx(1, abs=0.02) for row in rows)


def test_rows_of_the_benchmark_are_read(tmp_path):
    times = {"one": 234.571, "cqs": 122.448, "ring": 118.0, "torch": 130.0}
    row = {"benchmark": "peers forward", "case": "full-131072-h16-kv16-d128", "num_tasks": 2}
    rows = [row | {"executor": name, "median_ms": each} for name, each in times.items()]
    measured = tmp_path / "rows.jsonl"
    measured.write_text("".join(json.dumps(row | {"dtype": "bfloat16"}) + "\n" for row in rows))
    rows = read_rows(str(measured))
    assert [(row.method, row.num_devices) for row in rows] == [("ring", 1), ("cqs", 2), ("ring", 2)]
    assert rows[0].case == Workload(131072, AttentionShape(16, 128, num_kv_heads=16))
    assert all(row.ratio(fit(rows)) == pytest.approx(1, abs=0.03) for row in rows)
    measured.write_text(measured.read_text().replace("-d128", "-d128-best"))
    assert read_rows(str(measured)) == rows, "of other kernels"
    measured.write_text('{"benchmark": "peers forward"}\n')
    with pytest.raises(ValueError, match="line 1: KeyError"):
        read_rows(str(measured))
    measured.write_text("")
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(str(measured))
