"""What does not fit is refused in one message, on every rank."""

import re

import pytest
import torch
from models import AXES, call_block, make_block, make_on_mesh
from programs import raised

from cqs.nn import HybridDecoder
from cqs.patterns import causal, per_head

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "options", "how", "message"),
    [
        ((1, 5), {}, {}, "num_heads .* 5 ranks of the tensor axis, got 12"),
        ((1, 4), {"num_kv_heads": 2}, {}, "num_kv_heads .* 4 ranks of the tensor axis, got 2"),
        ((1, 4), {"feed_forward_size": 38}, {}, "feed_forward_size .* 4 ranks .*, got 38"),
        ((1, 2), {"pattern": per_head([[causal()] * 6])}, {}, "pattern .* 12 heads, got 6"),
        ((1, 2), {}, {"names": AXES[::-1]}, r"mesh .* axes \('sequence', .*, got \('tensor'"),
        ((1, 2), {}, {"backwards": True}, r"mesh must have ascending ranks, got \[\[1, 0\]\]"),
    ],
)
def test_a_mesh_that_does_not_fit(mesh_ranks, shape, options, how, message):
    for error, text in mesh_ranks.run(shape[1], raised, make_on_mesh, shape, options, how):
        assert error is ValueError and re.match(message, text)


def test_a_rank_outside_of_the_mesh(mesh_ranks):
    assert mesh_ranks.run(8, raised, make_on_mesh, (1, 2), {}, {}) == [
        *[None] * 2,
        *(
            (ValueError, f"mesh must contain this process, rank {rank}, got [0, 1]")
            for rank in range(2, 8)
        ),
    ]


ROWS = torch.zeros(1, 2, 24, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([ROWS[:, :1], ROWS, ROWS, ROWS], "with a row on every rank, got rows (1, 2)"),
        ([ROWS, ROWS, ROWS, ROWS[:, :0]], "with a row on every rank, got rows (2, 0)"),
        ([ROWS, ROWS, ROWS.repeat(2, 1, 1), ROWS], "batch 1, rank 0 has 2"),
        ([ROWS, ROWS, ROWS, ROWS.float()], "dtype torch.float32, rank 0 has torch.float64"),
        ([ROWS, ROWS.to("meta"), ROWS, ROWS], "hidden must be on the cpu device of the mesh"),
        ([ROWS, ROWS, torch.zeros(24), ROWS], "must be [batch of at least 1, rows, ...], got (24"),
        ([ROWS[:0]] * 4, "must be [batch of at least 1, rows, ...], got (0, 2, 24)"),
        ([ROWS, None, ROWS, ROWS], "hidden must be a tensor, got NoneType"),
    ],
    ids=["chunks", "rows", "batch", "dtype", "device", "dimensions", "empty", "none"],
)
def test_shards_that_do_not_fit_are_refused_on_every_rank(mesh_ranks, shards, message):
    errors = mesh_ranks.run(4, raised, call_block, (2, 2), shards)
    assert all(message in text for _, text in errors), errors
    assert mesh_ranks.run(4, raised, call_block, (2, 2), [ROWS] * 4) == [None] * 4


def test_a_dtensor_of_one_rank_is_named_on_every_rank(mesh_ranks):
    *others, last = mesh_ranks.run(4, raised, call_block, (2, 2), [ROWS] * 4, True)
    assert last[0] is TypeError
    assert all(error is ValueError and "hidden.to_local()" in text for error, text in others)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden_size": 36}, ValueError, "hidden_size .* even multiple of num_heads, 12, got 36"),
        ({"num_kv_heads": 5}, ValueError, "num_heads .* multiple of num_kv_heads, 5, got 12"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"feed_forward_size": -4}, ValueError, "feed_forward_size must be at least 1, got -4"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta must be positive, got 0.0"),
        ({"pattern": "causal"}, TypeError, r"pattern must be a cqs\.patterns\.Pattern, got str"),
    ],
)
def test_options_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        make_block(None, **options)


def test_blocks_of_a_decoder_are_alike():
    unlike = [make_block(None), make_block(None, hidden_size=48)]
    for blocks in ([], unlike):
        with pytest.raises(ValueError, match="blocks must be at least one"):
            HybridDecoder(5, blocks)
    with pytest.raises(TypeError, match="blocks must be HybridTransformerBlocks, got"):
        HybridDecoder(5, [torch.nn.Linear(2, 2)])
