"""The benchmarks ``block`` and ``model`` verify and time a layer on meshes, and training steps."""

import pytest
import torch
from models import make_mesh

from benchmarks import block, layer_parts, model
from cqs.patterns import sliding_window

pytestmark = pytest.mark.long

SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "feed_forward_size": 64}
LAYOUTS = {"hybrid 2x2": (2, 2), "sequence 4x1": (4, 1)}


def measured(group):
    meshes = {name: make_mesh(*shape) for name, shape in LAYOUTS.items()}
    given = SIZES, 64, sliding_window(4, 0), torch.device("cpu")
    return block.measure(meshes, *given, repeats=1, group=group)


def test_rows_of_every_layout_are_kept_by_the_first_rank(mesh_ranks):
    rows, *others = mesh_ranks.run(4, measured)
    assert others == [[]] * 3
    assert [row.executor for row in rows] == list(LAYOUTS)
    for row in rows:
        parts = [row.details[f"{part}_ms"] for part in layer_parts.PARTS]
        assert min(parts) > 0 and row.num_tasks == 4 and row.case.startswith("window-64-h4-kv2")


def test_steps_on_ranks_have_the_gradients_of_one_device(ranks):
    """Otherwise the benchmark raises."""
    given = "llama-tiny", 64, model.METHODS, torch.device("cpu"), 1
    rows, *_ = ranks.run(4, model.measure, *given)
    assert [row.num_tasks for row in rows] == [1, 1, 4]
