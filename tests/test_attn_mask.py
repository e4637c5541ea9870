"""``cqs.attention`` takes the arguments of PyTorch's function, by position too."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import cqs
from cqs.patterns import sliding_window

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SHAPES = [(1, 40), (30, 40), (4, 30, 40), (2, 1, 1, 40), (2, 4, 30, 40), (2, 1, 30, 1)]


def operands(num_kv_heads=4):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 30, 8), *[(2, num_kv_heads, 40, 8)] * 2]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def draw_mask(shape, kind):
    """A mask; of a boolean one and of ``holes`` some rows may have no key."""
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(shape, generator=generator) < 0.7
    if kind == "bool":
        return visible
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    return bias.masked_fill(~visible, -torch.inf) if kind == "holes" else bias


@pytest.mark.sample(4)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", ["bool", "bias", "holes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_equal_those_of_torch(shape, kind, in_graph):
    call = cqs.attention
    if in_graph:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in operands()]
    mask = draw_mask(shape, kind)
    if kind != "bool":
        leaves.append(mask.requires_grad_())
    outputs = call(*leaves[:3], mask, num_tasks=3), scaled_dot_product_attention(*leaves[:3], mask)
    found, expected = ([o, *torch.autograd.grad(o.square().sum(), leaves)] for o in outputs)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want.nan_to_num(), rtol=1e-10, atol=1e-10)


def test_arguments_by_position():
    query, key, value = (each[:, :, :30] for each in operands())
    found = cqs.attention(query, key, value, None, 0.0, True, scale=0.3, enable_gqa=False)
    expected = scaled_dot_product_attention(query, key, value, None, 0.0, True, scale=0.3)
    torch.testing.assert_close(found, expected)
    found = cqs.attention(query, key, value, None, 0.4, seed=3)
    torch.testing.assert_close(found, cqs.attention(query, key, value, dropout_p=0.4, seed=3))


@pytest.mark.parametrize("in_graph", [False, True])
def test_masks_are_intersected_with_patterns_and_added_to_scores(in_graph):
    call = torch.compile(cqs.attention, fullgraph=True, backend="aot_eager")
    call = call if in_graph else cqs.attention
    query, key, value = (each[:, :, :30] for each in operands())
    visible, bias = draw_mask((2, 4, 30, 30), "bool"), draw_mask((30, 30), "bias")
    pattern, sinks = sliding_window(7, 3), torch.zeros(4, dtype=torch.float64)
    window = torch.from_numpy(pattern.to_mask(30)).tril()
    found = call(query, key, value, visible, is_causal=True, pattern=pattern)
    dense = scaled_dot_product_attention(query, key, value, visible & window)
    torch.testing.assert_close(found, dense.nan_to_num())
    found = call(query, key, value, bias, scores=cqs.Scores(sinks=sinks), return_lse=True)
    both = cqs.attention(query, key, value, scores=cqs.Scores(sinks, bias=bias), return_lse=True)
    torch.testing.assert_close(tuple(found), tuple(both))


def test_a_broadcast_query_gets_masks_of_the_whole_batch():
    query, key, value = operands()
    mask = draw_mask((2, 1, 1, 40), "bool")
    for call in (cqs.attention, torch.compile(cqs.attention, fullgraph=True, backend="aot_eager")):
        expected = scaled_dot_product_attention(query[:1], key, value, mask)
        torch.testing.assert_close(call(query[:1], key, value, mask), expected)


def test_enable_gqa_in_graphs():
    call = torch.compile(cqs.attention, backend="aot_eager")
    query, key, value = operands(2)
    with pytest.raises(ValueError, match="num_kv_heads must be 1 or num_heads, 4, .* got 2"):
        call(query, key, value, enable_gqa=False)
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(call(query, key, value, enable_gqa=True), expected)
    torch.testing.assert_close(call(query, key, value), expected)
    one = query, key[:, :1], value[:, :1]
    torch.testing.assert_close(call(*one, enable_gqa=False), scaled_dot_product_attention(*one))
