"""``torch.compile`` leaves attention out of its graphs."""

import pytest
import torch

import cqs


def attend(query):
    return cqs.attention(2 * query, query, query, is_causal=True).sin()


def test_a_compiled_function_computes_the_same():
    compiled = torch.compile(attend, backend="aot_eager")
    for tokens, stance in ((9, "default"), (11, "default"), (30, "fail_on_recompile")):
        query = torch.randn(1, 2, tokens, 8, dtype=torch.float64, requires_grad=True)
        with torch.compiler.set_stance(stance):
            outputs = attend(query), compiled(query)
        gradients = [torch.autograd.grad(output.sum(), query) for output in outputs]
        assert torch.equal(*outputs)
        torch.testing.assert_close(*gradients)


def test_a_whole_graph_is_refused():
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="attention of cqs runs outside of the graph"):
        compiled(torch.randn(1, 2, 9, 8))
