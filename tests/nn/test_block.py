"""A block, and a model of blocks, on a mesh are what they are on one device."""

from copy import deepcopy

import pytest
import torch
from models import (
    difference_under_fully_shard,
    draw,
    gradients_of_experts,
    largest_differences,
    make_block,
    make_compiled,
    make_decoder,
    moved_between_layouts,
    packed_differences,
    train,
    uneven_difference,
)
from support.exact import assert_tracks_exact

from cqs.patterns import causal, global_tokens, per_head, sliding_window, strided

pytestmark = pytest.mark.slow

WINDOW = sliding_window(6, 0) | global_tokens(2)
AROUND = sliding_window(9, 9)
OF_HEADS = per_head([[causal()] * 5 + [strided(3)] * 3 + [sliding_window(4, 0)] * 4])


@pytest.mark.parametrize("shape", [(1, 2), (3, 2)], ids=str)
def test_packed_sequences_of_each_pass_are_computed_alone(mesh_ranks, shape):
    """A dense layer and one with a window of its own, and other sequences in every pass."""
    all_lengths = [(10, 1, 22), (5, 5, 20)]
    patterns = [None, sliding_window(4, 0)]
    errors = mesh_ranks.run(shape[0] * shape[1], packed_differences, shape, patterns, all_lengths)
    assert max(map(max, errors)) < 1e-10


WIDE = {"hidden_size": 1024, "num_heads": 8, "num_kv_heads": 4, "feed_forward_size": 1536}


TRAININGS = {
    "pattern of each head": (make_decoder, (2, 2), {"patterns": [OF_HEADS]}, {}),
    "not causal": (make_decoder, (3, 2), {"is_causal": False, "patterns": [AROUND]}, {}),
    "a thousand features": (make_decoder, (1, 2), WIDE, {"tokens": 17, "batch": 1}),
    "a row for each rank": (make_decoder, (3, 2), {}, {"tokens": 6}),
    "compiled": (make_compiled, (1, 2), {"patterns": [WINDOW]}, {}),
    "2 x 1": (make_decoder, (2, 1), {"patterns": [WINDOW, None]}, {"steps": 2}),
    "1 x 4": (make_decoder, (1, 4), {"patterns": [WINDOW, None]}, {"steps": 2}),
    "3 x 2": (make_decoder, (3, 2), {"patterns": [WINDOW, None]}, {"steps": 2}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("make", "shape", "options", "sizes"), TRAININGS.values(), ids=TRAININGS)
def test_a_block_trains_as_on_one_device(mesh_ranks, make, shape, options, sizes):
    """In a decoder of one block or two."""
    num_ranks = shape[0] * shape[1]
    errors = mesh_ranks.run(num_ranks, largest_differences, make, shape, options, **sizes)
    assert max(map(max, errors)) < 1e-11


def test_shards_may_differ_between_tensor_axes(mesh_ranks):
    assert max(mesh_ranks.run(6, uneven_difference, (3, 2, 1, 1, 8, 8), (3, 2))) < 1e-11


@pytest.mark.parametrize(("shape", "is_compiled"), [((2, 2), False), ((2, 1), True)], ids=str)
def test_gradients_are_those_under_fully_shard(mesh_ranks, shape, is_compiled):
    num_ranks = shape[0] * shape[1]
    errors = mesh_ranks.run(num_ranks, difference_under_fully_shard, shape, is_compiled)
    assert max(errors) < 1e-11


def test_states_move_between_layouts(mesh_ranks):
    assert all(mesh_ranks.run(4, moved_between_layouts, [(1, 4), (2, 2), (4, 1)]))


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [None, sliding_window(50, 0) | global_tokens(2)], ids=str)
def test_a_block_on_a_gpu_tracks_one_in_float64(pattern):
    """As the same block on a CPU does."""
    sizes = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "feed_forward_size": 384}
    block = make_block(None, **sizes, pattern=pattern, dtype=torch.bfloat16)
    hidden = torch.randn(2, 300, 256).bfloat16()

    def passes(device, dtype):
        ours = deepcopy(block).to(device, dtype)
        inputs = hidden.to(device, dtype, copy=True).requires_grad_()
        output = ours(inputs)
        output.sum().backward()
        assert output.device.type == device
        gradients = {name: each.grad.cpu() for name, each in ours.named_parameters()}
        return {"output": output.detach().cpu(), "hidden": inputs.grad.cpu(), **gradients}

    found = passes("cuda", torch.bfloat16)
    eager, exact = passes("cpu", torch.bfloat16), passes("cpu", torch.float64)
    for name, want in exact.items():
        assert_tracks_exact(found[name], eager[name], want, slack=3, name=name)


def test_a_block_is_llamas():
    """Written out once more, with PyTorch's attention."""
    block = make_block(None)
    hidden = torch.randn(2, 7, 24, dtype=torch.float64)
    state, layer = block.state_dict(), torch.nn.functional.linear

    def norm(rows, name):
        return rows * rows.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * state[name]

    def turned(heads):
        pairs = torch.complex(*heads.chunk(2, dim=-1))
        angles = torch.arange(7).outer(1 / 10_000 ** torch.tensor([0.0], dtype=torch.float64))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    rows = norm(hidden, "attention_norm.weight")
    query, key, value = (
        layer(rows, state[f"attention.{name}.weight"]).unflatten(-1, (-1, 2)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    heads = torch.nn.functional.scaled_dot_product_attention(
        turned(query), turned(key), value, is_causal=True, enable_gqa=True
    )
    expected = hidden + layer(heads.transpose(1, 2).flatten(2), state["attention.output.weight"])
    rows = norm(expected, "feed_forward_norm.weight")
    gate, up, down = (state[f"feed_forward.{name}.weight"] for name in ("gate", "up", "down"))
    expected = expected + layer(torch.nn.functional.silu(layer(rows, gate)) * layer(rows, up), down)
    torch.testing.assert_close(block(hidden), expected, atol=1e-12, rtol=0)


@pytest.mark.long
def test_a_compiled_decoder_trains_as_one_that_is_not(one_thread):
    """Compiled once for one length and once for any."""
    for tokens, stance in ((29, "default"), (31, "default"), (40, "fail_on_recompile")):
        data, found = draw(tokens, 2), []
        with torch.compiler.set_stance(stance):
            for make in (make_decoder, make_compiled):
                torch.manual_seed(0)
                found.append(train(make(None, [WINDOW]), None, data, 1))
        torch.testing.assert_close(*found, atol=1e-12, rtol=0)


def test_gradients_of_what_some_ranks_did_not_use(mesh_ranks):
    for gradients, complaint in mesh_ranks.run(2, gradients_of_experts):
        assert gradients == [[[1.0, 1.0]], [[10.0, 10.0]], None]
        assert complaint == (ValueError, "rank 1 of the group has parameters 3, rank 0 has 2")
