"""``torch.compile`` leaves attention out of its graphs."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import cqs
from cqs.patterns import (
    acsr,
    block_sparse,
    documents,
    from_block_mask,
    from_mask,
    global_tokens,
    longformer,
    per_head,
    sliding_window,
)

pytestmark = pytest.mark.slow

MASK = torch.arange(64)[:, None] - torch.arange(64) < 9
ROWS = np.arange(64)
PATTERNS = {
    "from_mask": lambda: from_mask(MASK),
    "from_mask-numpy": lambda: per_head([[from_mask(MASK.numpy()), sliding_window(4)]]),
    "from_block_mask": lambda: from_block_mask(
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu", 16)
    ),
    "block_sparse": lambda: block_sparse(torch.eye(4), 16),
    "acsr": lambda: acsr(ROWS // 2, np.ones_like(ROWS), ROWS // 3),
    "documents": lambda: documents(torch.tensor([0, 10, 64], dtype=torch.int32)),
    "global_tokens": lambda: global_tokens(np.array([3, 5])) | from_mask(MASK),
    "longformer": lambda: longformer(8, torch.tensor([3, 5])),
}


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


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", PATTERNS.values(), ids=PATTERNS)
def test_patterns_are_made_in_a_compiled_function(make):
    """Their code reads arrays, which the compiler would take for tensors of the graph."""

    def attend(query):
        pattern = make()
        output = cqs.attention(query, query, query, pattern=pattern).sin()
        return output * pattern.density(64) if pattern.heads == (1, 1) else output

    query = torch.randn(1, 2, 64, 8)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, backend="aot_eager")(query), attend(query))
