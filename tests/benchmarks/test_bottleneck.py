"""The parts of a transformers layer that the benchmark ``bottleneck`` times."""

import json

import pytest

from benchmarks import bottleneck
from benchmarks.plots.bottleneck import plot_bottleneck
from cqs.patterns import sliding_window

pytestmark = pytest.mark.long

SMALL = {
    "bert": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
    "llama": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 128},
}


def small_config(kind):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, vocab_size=50, **SMALL[kind])


@pytest.mark.parametrize("pattern", [None, sliding_window(16, 16)], ids=["dense", "window"])
@pytest.mark.parametrize("kind", SMALL)
def test_parts_of_a_model_are_timed(kind, pattern):
    rows = [
        bottleneck.measure(small_config(kind), tokens, pattern, name=kind, repeats=1)
        for tokens in (64, 300)
    ]
    for row in rows:
        assert all(row.details[part] > 0 for part in bottleneck.PARTS)
        assert sum(row.details[part] for part in bottleneck.PARTS) == pytest.approx(row.median_ms)
        assert 0 < row.ratio < 1
        assert row.executor == ("dense" if pattern is None else repr(pattern))


def test_rows_and_figure_are_written(tmp_path):
    folder, out, picture = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "shares.png"
    small_config("bert").save_pretrained(folder)
    options = {"tokens": [32, 64], "repeats": 1, "out": str(out), "picture": str(picture)}
    bottleneck.run(model=str(folder), **options)
    bottleneck.run(model=str(folder), pattern="sliding_window(4, 4)", **options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["case"] for row in rows] == 2 * ["model-32", "model-64"]
    panels = [axes for axes in plot_bottleneck(rows).axes if axes.patches]
    assert [len(axes.patches) for axes in panels] == 2 * [2 * len(bottleneck.PARTS)]
    assert picture.stat().st_size > 1000
