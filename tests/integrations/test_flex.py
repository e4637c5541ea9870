"""FlexAttention's interface: its block masks, its score functions, its answer."""

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import cqs
from cqs.patterns import causal

pytestmark = pytest.mark.slow

TOKENS = 300


def operands(num_kv_heads=4, seqlen_q=TOKENS, seqlen_kv=TOKENS):
    shapes = (4, seqlen_q), (num_kv_heads, seqlen_kv), (num_kv_heads, seqlen_kv)
    return [torch.randn(2, *shape, 16, dtype=torch.float64) for shape in shapes]


def up_to(batch, head, query, key):
    return key <= query


def near_or_first(batch, head, query, key):
    """Differs by head."""
    return ((query - key).abs() <= 20 * (head + 1)) | (key < 3)


def below_blocks(batch, head, query, key):
    """Whole rows and columns see nothing."""
    return (query >= 140) & (key < 128)


def block_mask(mask_mod, seqlen_q=TOKENS, seqlen_kv=TOKENS, **options):
    heads = 4 if mask_mod is near_or_first else None
    return torch_flex.create_block_mask(
        mask_mod, None, heads, seqlen_q, seqlen_kv, device="cpu", **options
    )


def by_torch(*tensors, **options):
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        aux = torch_flex.AuxRequest(lse=True)
        output, others = torch_flex.flex_attention(
            *tensors, enable_gqa=True, return_aux=aux, **options
        )
    return output, others.lse


def check(found, expected):
    torch.testing.assert_close(tuple(found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mask_mod", "seqlen_q", "block"),
    [
        (up_to, TOKENS, 128),
        (near_or_first, TOKENS, 128),
        (below_blocks, TOKENS, 128),
        (near_or_first, 90, (32, 64)),
    ],
)
def test_a_block_mask_gives_what_torch_gives(mask_mod, seqlen_q, block):
    mask = block_mask(mask_mod, seqlen_q, BLOCK_SIZE=block)
    tensors = operands(num_kv_heads=2, seqlen_q=seqlen_q)
    options = {"enable_gqa": True, "return_lse": True, "scale": 0.3}
    ours = cqs.flex_attention(*tensors, block_mask=mask, num_tasks=5, **options)
    check(ours, by_torch(*tensors, block_mask=mask, scale=0.3))


def test_a_key_of_batch_one_is_that_of_all_queries():
    tensors = operands()
    shared = tensors[0], tensors[1][:1], tensors[2][:1]
    whole = [each.expand(2, -1, -1, -1) for each in shared]
    mask = block_mask(up_to)
    found = cqs.flex_attention(*shared, block_mask=mask, num_tasks=3, return_lse=True)
    check(found, by_torch(*whole, block_mask=mask))


def test_blocks_count_whatever_the_mask_function_says():
    diagonal = block_mask(up_to, 256, 256)  # of which only the diagonal blocks are partial
    mask = torch_flex.BlockMask.from_kv_blocks(
        diagonal.kv_num_blocks, diagonal.kv_indices, BLOCK_SIZE=128, seq_lengths=(256, 256)
    )
    query, key, value = operands(4, 256, 256)
    block = torch.arange(256) // 128
    scores = (query @ key.mT / 4).masked_fill(block[:, None] != block, -torch.inf)
    found = cqs.flex_attention(query, key, value, block_mask=mask, num_tasks=3, return_lse=True)
    check(found, (scores.softmax(-1) @ value, scores.logsumexp(-1)))


def test_a_compiled_function_computes_the_same():
    layer = torch.nn.Linear(16, 16, dtype=torch.float64)

    def attend(query, mask):
        query = layer(query)
        return cqs.flex_attention(query, query, query, block_mask=mask, num_tasks=3).sin()

    compiled = torch.compile(attend, backend="aot_eager")
    for tokens in (90, 100):
        query = torch.randn(2, 4, tokens, 16, dtype=torch.float64)
        mask = block_mask(up_to, tokens, tokens, BLOCK_SIZE=32)
        outputs = [each(query, mask) for each in (attend, compiled)]
        check(*(torch.autograd.grad(each.sum(), layer.parameters()) for each in outputs))


def test_what_does_not_fit_is_refused():
    tensors = query, key, value = operands()
    few = query, key[:, :2], value[:, :2]
    three = torch_flex.create_block_mask(near_or_first, None, 3, TOKENS, TOKENS, device="cpu")
    lse, most = torch_flex.AuxRequest(lse=True), torch_flex.AuxRequest(max_scores=True)
    for given, options, error, message in (
        (tensors, {"block_mask": causal()}, TypeError, "block_mask must be a BlockMask"),
        (([1], [1], [1]), {}, TypeError, "query must be a torch.Tensor, got list"),
        (tensors, {"block_mask": block_mask(up_to, 90)}, ValueError, "90"),
        (tensors, {"block_mask": three}, ValueError, "num_heads must be 3 .* got 4"),
        (tensors, {"score_mod": 3}, TypeError, "score_mod must be None or a function .* got 3"),
        (few, {"enable_gqa": False}, ValueError, "without enable_gqa, got 2"),
        (tensors, {"return_lse": True, "return_aux": lse}, ValueError, "return_lse must be False"),
        (tensors, {"return_aux": most}, NotImplementedError, "must not request max_scores"),
    ):
        with pytest.raises(error, match=message):
            cqs.flex_attention(*given, **options)


def test_a_score_function_gives_what_torch_gives():
    tensors = operands(2)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.float64)

    def score_mod(score, batch, head, query, key):
        return 2 * torch.tanh(score / 2) - slopes[head] * (query - key).abs() + batch

    mask = block_mask(near_or_first)
    options = {"score_mod": score_mod, "block_mask": mask}
    found = cqs.flex_attention(*tensors, **options, num_tasks=5, return_lse=True)
    check(found, by_torch(*tensors, **options))
    aux = torch_flex.AuxRequest(lse=True)
    output, others = cqs.flex_attention(
        *tensors, **options, return_aux=aux, kernel_options={"BLOCK_M": 64}
    )
    check((output, others.lse), by_torch(*tensors, **options))
    assert others.max_scores is None
    aux = torch_flex.AuxRequest()
    assert cqs.flex_attention(*tensors, return_aux=aux)[1] == torch_flex.AuxOutput()
