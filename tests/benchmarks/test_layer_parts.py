"""The benchmarks ``block`` and ``model`` verify and time a layer on meshes, and steps of models."""

import pytest
from ranks import run_as_torchrun

from benchmarks.__main__ import main
from cqs.report.measurement import read_rows

pytestmark = pytest.mark.long

LAYERS = ["dense-63-h4-kv2-d8", "window-63-h4-kv2-d8"]
LAYOUTS = [("hybrid 2x2", 4), ("sequence 4x1", 4)]
STEPS = [("sdpa", 1), ("cqs one", 1), ("cqs", 4)]
ROWS = {"block --heads 4 --kv-heads 2 --head-dim 8": (LAYERS, LAYOUTS)}
"""Command -> cases of its rows, and executor and number of ranks of the rows of a case."""
for name in ("llama-tiny", "wan-tiny", "cogvideox-tiny"):
    ROWS[f"model --model {name}"] = [f"{name}-63"], STEPS


@pytest.mark.parametrize("command", ROWS)
def test_the_first_rank_writes_rows_of_verified_results(tmp_path, command):
    out = str(tmp_path / "rows.jsonl")
    options = ["--seqlen", "63", "--repeats", "1", "--out", out]
    run_as_torchrun(4, main, [*command.split(), *options])
    rows, (cases, methods) = read_rows(out, lambda row: [row]), ROWS[command]
    found = [(row["case"], row["executor"], row["num_tasks"]) for row in rows]
    assert found == [(case, *each) for case in cases for each in methods]
    for row in rows:
        parts = [each for name, each in row["details"].items() if name.endswith("_ms")]
        assert min([row["median_ms"], *parts]) > 0
