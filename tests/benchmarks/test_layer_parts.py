"""The benchmark ``block`` verifies a layer on meshes, and times it and its parts."""

import pytest
import torch
from models import make_mesh

from benchmarks import block, layer_parts
from cqs.executors.verify import VerificationError
from cqs.patterns import sliding_window

pytestmark = pytest.mark.long

SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "feed_forward_size": 64}
LAYOUTS = {"hybrid 2x2": (2, 2), "sequence 4x1": (4, 1)}


def measured(group, spoil):
    """Return the rows of a small benchmark, or what it raises."""
    plain, meshes = block.reduce_gradients, {n: make_mesh(*s) for n, s in LAYOUTS.items()}
    block.reduce_gradients = (lambda layer, mesh: None) if spoil else plain
    device = torch.device("cpu")
    try:
        return block.measure(
            meshes, SIZES, 64, sliding_window(4, 0), device, repeats=1, group=group
        )
    except VerificationError as error:
        return str(error)
    finally:
        block.reduce_gradients = plain


def test_rows_of_every_layout_are_kept_by_the_first_rank(mesh_ranks):
    rows, *others = mesh_ranks.run(4, measured, False)
    assert others == [[]] * 3
    assert [row.executor for row in rows] == list(LAYOUTS)
    for row in rows:
        parts = [row.details[f"{part}_ms"] for part in layer_parts.PARTS]
        assert min(parts) > 0 and row.num_tasks == 4 and row.case.startswith("window-64-h4-kv2")


def test_a_layer_whose_gradients_are_not_summed_is_wrong(mesh_ranks):
    first, *others = mesh_ranks.run(4, measured, True)
    assert "hybrid 2x2: gradient of " in first and others == [first] * 3
