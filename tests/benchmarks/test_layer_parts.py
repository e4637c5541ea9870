"""The benchmarks ``block``, ``model`` and ``peers`` verify and time on the ranks of torchrun."""

import pytest
from ranks import run_as_torchrun

from benchmarks.__main__ import main
from cqs.report.measurement import read_rows

pytestmark = pytest.mark.long

LAYERS = ["dense-63-h4-kv2-d8", "window-63-h4-kv2-d8"]
LAYOUTS = [("hybrid 2x2", 4), ("sequence 4x1", 4)]
STEPS = [("sdpa", 1), ("cqs one", 1), ("cqs", 4)]
ROWS = {"block --seqlen 63 --heads 4 --kv-heads 2 --head-dim 8": (LAYERS, LAYOUTS)}
"""Command -> cases of its rows, and executor and number of ranks of the rows of a case."""
for name in ("llama-tiny", "wan-tiny", "cogvideox-tiny"):
    ROWS[f"model --seqlen 63 --model {name}"] = [f"{name}-63"], STEPS
for name, tokens in (("documents:pile", 256), ("window-3d", 768), ("blocks-20", 2048)):
    command = f"peers --heads 4 --only one,cqs,ulysses --pattern {name} --seqlen {tokens}"
    case = f"{name.replace(':', '-')}-{tokens}-h4-kv4-d128"
    ROWS[command] = 2 * [case], [("one", 4), ("cqs", 4), ("ulysses", 4)]  # both passes


@pytest.mark.parametrize("command", ROWS)
def test_the_first_rank_writes_rows_of_verified_results(tmp_path, command):
    out = str(tmp_path / "rows.jsonl")
    run_as_torchrun(4, main, [*command.split(), "--repeats", "1", "--out", out])
    rows, (cases, methods) = read_rows(out, lambda row: [row]), ROWS[command]
    found = [(row["case"], row["executor"], row["num_tasks"]) for row in rows]
    assert found == [(case, *each) for case in cases for each in methods]
    times = [part for row in rows for part in (row | row["details"]).items()]
    assert min(value for name, value in times if name.endswith("_ms")) > 0
