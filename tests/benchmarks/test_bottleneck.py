"""The parts of a transformers layer that the benchmark ``bottleneck`` times."""

import json

import pytest
from transformers import AutoConfig

from benchmarks import bottleneck

pytestmark = pytest.mark.long

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 50}


def test_rows_and_figure_are_written(tmp_path):
    folder, out, picture = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "shares.png"
    AutoConfig.for_model("bert", **SMALL).save_pretrained(folder)
    options = {"tokens": [32, 64], "repeats": 1, "out": str(out), "picture": str(picture)}
    bottleneck.run(model=str(folder), **options)
    bottleneck.run(model=str(folder), pattern="sliding_window(4, 4)", **options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == 2 * ["model-32", "model-64"]
    for row in rows:
        parts = [row["details"][part] for part in bottleneck.PARTS]
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["median_ms"])
    assert picture.stat().st_size > 1000
