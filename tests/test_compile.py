"""``torch.compile`` keeps attention in one graph."""

import gc
from functools import partial
from itertools import pairwise, starmap
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from support.exact import assert_tracks_exact
from torch.library import opcheck
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cqs
from cqs.executors.local import LocalExecutor
from cqs.patterns import (
    acsr,
    bigbird,
    block_sparse,
    causal,
    documents,
    from_block_mask,
    from_mask,
    global_tokens,
    longformer,
    padded,
    per_head,
    sliding_window,
)
from cqs.patterns.handle import _memories
from cqs.scheduler import Grid2D, Hosts, Quorums

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_compiler")]

MASK = torch.arange(40)[:, None] - torch.arange(40) < 9
WINDOW = sliding_window(5, 2)
DOCUMENTS = documents([0, 13, 14, 40])
CALLS_ANYWHERE = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"pattern": sliding_window(7)},
    "documents": {"pattern": DOCUMENTS, "is_causal": True},
    "per-head": {"pattern": per_head([[WINDOW, WINDOW, causal(), DOCUMENTS]])},
    "dropout": {"dropout_p": 0.3},
    "dropout-seed": {"dropout_p": 0.3, "seed": 2**63 - 1, "pattern": WINDOW},
    "lse": {"return_lse": True, "scale": 0.7},
    "verified": {"verify": True, "is_causal": True, "backend": "reference"},
}
"""Name -> options of calls in one process, or on ranks."""
CALLS = CALLS_ANYWHERE | {
    "causal tasks": {"is_causal": True, "num_tasks": 7},
    "documents in tasks": {"pattern": DOCUMENTS, "num_tasks": 3},
    "quorums": {"num_tasks": 7, "plan": Quorums((0, 1, 3))},
    "hosts": {"num_tasks": 6, "plan": Hosts(Grid2D(3, 1), 2)},
}


def operands(tokens=40, dtype=torch.float32, batches=(2, 2, 2), head_dim=8, device="cpu"):
    generator = torch.manual_seed(tokens)
    return [
        torch.randn(batch, heads, tokens, head_dim, dtype=dtype, generator=generator)
        .to(device)
        .requires_grad_()
        for batch, heads in zip(batches, (4, 2, 2), strict=True)
    ]


def results(function, tensors, *others):
    """The outputs of a function, and the gradients of its first one."""
    torch.manual_seed(3)
    found = function(*tensors, *others)
    outputs = found if isinstance(found, tuple) else (found,)
    return *outputs, *torch.autograd.grad(outputs[0].square().sum(), tensors)


def assert_alike(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=torch.finfo(one.dtype).eps * 64)


def layer(query, key, value, **options):
    found = cqs.attention(query.sin(), key * 2, value, **options)
    return (found[0].cos(), found[1]) if options.get("return_lse") else found.cos()


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_graph_has_the_whole_call(options):
    """Outputs are bitwise identical; gradients are up to the order of sums."""
    attend = partial(layer, **options)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, expected = (results(each, operands()) for each in (compiled, attend))
    num_outputs = len(expected) - 3
    assert all(map(torch.equal, found[:num_outputs], expected[:num_outputs]))
    assert_alike(found, expected)
    if options.get("return_lse"):
        assert not found[1].requires_grad


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", ["full", "window", "documents", "per-head"])
def test_graphs_run_in_inference_mode_and_outside(name):
    tensors = [each.detach() for each in operands()]
    options = {**CALLS[name]}
    compiled = torch.compile(
        lambda *each: cqs.attention(*each, **options), backend="aot_eager", fullgraph=True
    )
    for first in (True, False, True):
        with torch.inference_mode(first):
            torch.testing.assert_close(compiled(*tensors), cqs.attention(*tensors, **options))


def assert_as_exact_as_eager(compiled, attend, tensors):
    """Outputs are read before the next call, which may reuse their memory."""
    found = [each.clone() for each in results(compiled, tensors)]
    eager = results(attend, tensors)
    exact = results(attend, [each.detach().double().requires_grad_() for each in tensors])
    for each in zip(found, eager, exact, strict=True):
        assert_tracks_exact(*each)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["window", "causal"])
def test_inductor_is_as_exact_as_eager(monkeypatch, tmp_path, kind, dtype):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    attend = partial(layer, **CALLS[kind])
    compiled = torch.compile(attend, fullgraph=True)
    assert_as_exact_as_eager(compiled, attend, operands(dtype=dtype))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # between two calls of operators
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents", "dropout-seed", "lse"])
def test_graphs_of_a_gpu(monkeypatch, tmp_path, mode, kind):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def attend(query, key, value):
        found = cqs.attention(query, key, value, **CALLS[kind])
        return (found[0].cos(), found[1]) if kind == "lse" else found.cos()

    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    for tokens in (*[40] * 4, *[40 if kind == "documents" else 300] * 2):
        torch.compiler.cudagraph_mark_step_begin()
        tensors = operands(tokens, torch.bfloat16, head_dim=64, device="cuda")
        assert_as_exact_as_eager(compiled, attend, tensors)


PATTERNS = {
    "full": lambda tokens, ends: None,
    "is_causal": lambda tokens, ends: None,
    "causal": lambda tokens, ends: causal(),
    "window": lambda tokens, ends: sliding_window(left=4, right=None),
    "growing-window": lambda tokens, ends: (
        sliding_window(tokens // 4, None) & sliding_window(None, tokens // 8)
    ),
    "bigbird": lambda tokens, ends: bigbird(block=4),
    "documents": lambda tokens, ends: documents(ends),
    "documents-list": lambda tokens, ends: documents([0, tokens // 3, tokens], is_causal=False),
    "documents-kv": lambda tokens, ends: documents(ends, [0, 20, tokens]),
    "combined": lambda tokens, ends: (
        documents(ends, is_causal=False) & WINDOW | sliding_window(1) - causal()
    ),
    "padded": lambda tokens, ends: padded(ends[1:], ends[1:].flip(0)) & causal(),
    "global_tokens": lambda tokens, ends: global_tokens(ends[1:2]) | WINDOW,
    "last-token": lambda tokens, ends: global_tokens((0, tokens - 1)) & sliding_window(tokens // 2),
    "longformer": lambda tokens, ends: longformer(tokens // 4, [0, 5]),
}
PATTERNS_OF_40_TOKENS = {
    "lists": lambda tokens, ends: (
        longformer(4, [1, 20]) | documents([0, 7, 40]) - block_sparse([[1]], 40)
    ),
    "mask": lambda tokens, ends: from_mask(MASK) & causal(),
    "mask-heads": lambda tokens, ends: from_mask(MASK.expand(2, 4, -1, -1) & (ends[1] > 2)),
    "block_sparse": lambda tokens, ends: block_sparse(torch.eye(4) * (ends[1] > 2), 10),
    "acsr": lambda tokens, ends: acsr(
        torch.arange(40) // 2, torch.ones(40, dtype=torch.int64), ends[1:].repeat(20) // 20
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*PATTERNS, *PATTERNS_OF_40_TOKENS])
def test_patterns_are_made_in_a_graph(name):
    """Compiled once for one length and once for any."""
    make = (PATTERNS | PATTERNS_OF_40_TOKENS)[name]
    options = {"is_causal": True, "num_tasks": 7} if name == "is_causal" else {}

    def attend(query, key, value, ends):
        pattern = make(query.shape[2], ends)
        return layer(query, key, value, pattern=pattern, **options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    lengths = (40, 48, 97) if name in PATTERNS else (40, 40)
    for number, tokens in enumerate(lengths):
        ends = torch.tensor([0, 5 + 6 * number, tokens])
        with torch.compiler.set_stance("fail_on_recompile" if number == 2 else "default"):
            found = results(compiled, operands(tokens), ends)
        assert_alike(found, results(attend, operands(tokens), ends))


def test_a_window_that_depends_on_the_length_must_not_be_negative():
    @partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(query):
        return cqs.attention(query, query, query, pattern=sliding_window(query.shape[2] - 40))

    attend(torch.randn(1, 2, 41, 8))
    with pytest.raises(ValueError, match="left must be at least 0, got -1"):
        attend(torch.randn(1, 2, 39, 8))


def test_patterns_are_not_exported():
    """A saved program has the number of a pattern, which is another one's in another process."""

    class Windowed(torch.nn.Module):
        def forward(self, query):
            return cqs.attention(query, query, query, pattern=WINDOW)

    with pytest.raises(NotImplementedError, match="pattern must be None"):
        torch.export.export(Windowed(), (torch.randn(1, 2, 40, 8),), strict=False)


ROWS = np.arange(40)
BROKEN_PATTERNS = {
    "from_mask-numpy": lambda: per_head([[from_mask(MASK.numpy()), sliding_window(4)]]),
    "from_block_mask": lambda: from_block_mask(
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, "cpu", 16)
    ),
    "block_sparse": lambda: block_sparse(torch.eye(4), 10),
    "acsr": lambda: acsr(ROWS // 2, np.ones_like(ROWS), ROWS // 3),
    "documents": lambda: documents(torch.tensor([0, 10, 40], dtype=torch.int32)) & WINDOW,
    "global_tokens": lambda: global_tokens(np.array([3, 5])) | from_mask(MASK),
    "longformer": lambda: longformer(8, torch.tensor([3, 5])),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("make", BROKEN_PATTERNS.values(), ids=BROKEN_PATTERNS)
def test_patterns_survive_graph_breaks(make):
    """Their code reads arrays, which the compiler would take for tensors of the graph."""

    def attend(query):
        pattern = make()
        output = cqs.attention(query, query, query, pattern=pattern).sin()
        if pattern.heads != (1, 1):
            return output
        return output * pattern.density(40) * pattern.count(range(40), range(40))

    query = torch.randn(1, 2, 40, 8)
    assert torch.equal(torch.compile(attend, backend="aot_eager")(query), attend(query))


@pytest.mark.sample(4)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["all", "selective"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.2, "is_causal": True}], ids=["dense", "dropout"]
)
def test_activation_checkpointing(monkeypatch, options, is_saved, is_compiled):
    """Policies see the operator, in eager mode too; the pattern outlives its last reference."""

    def policy(context, operator, *args, **kwargs):
        is_attention = operator in (
            torch.ops.cqs.attention.default,
            torch.ops.cqs.dense_attention.default,
        )
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    run = create_autospec(LocalExecutor.run, side_effect=LocalExecutor.run)
    monkeypatch.setattr(LocalExecutor, "run", run)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    chosen = {"context_fn": contexts} if is_saved else {}

    def attend(query, key, value, pattern):
        return layer(query, key, value, pattern=pattern, **options)

    def recomputed(*args):
        return checkpoint(attend, *args, use_reentrant=False, **chosen)

    if is_compiled:
        recomputed = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    found = [
        results(each, operands(), None if options else documents([0, 11, 40]))
        for each in (attend, recomputed)
    ]
    assert_alike(*found)
    assert run.call_count == 1 + (1 if is_saved else 2)


HANDLE, SEED = DOCUMENTS.handle, torch.tensor(5)
OPTIONS = (True, None, 2.0, False, 0.3, 7, "rows", None, False)


@pytest.mark.sample(4)
@pytest.mark.parametrize("batches", [(2, 2, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("is_dense", [False, True], ids=["pattern", "dense"])
def test_operators_pass_opcheck(is_dense, has_sinks, batches):
    from cqs.executors import local_operator as local

    attend = local.dense_attention if is_dense else local.attention
    tensors = operands(dtype=torch.float64, batches=batches)
    sinks = torch.randn(tensors[0].shape[1], requires_grad=True) if has_sinks else None
    where = (sinks, None, None, *((None, None) if is_dense else (HANDLE, SEED)))
    options = (True, None, None, False, 0.0, *OPTIONS[5:]) if is_dense else OPTIONS
    opcheck(attend, (*tensors, *where, *options))
    tensors = [each.detach() for each in tensors]
    where = (None if sinks is None else sinks.detach(), *where[1:])
    output, lse = attend(*tensors, *where, *options)
    backward = (
        torch.ops.cqs.dense_attention_backward if is_dense else torch.ops.cqs.attention_backward
    )
    opcheck(backward.default, (output, *tensors, output, lse, *where, *options))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "arguments",
    [
        ("cqs.patterns.positions:documents", "", "[...]", [], [torch.tensor([0, 4, 9])]),
        ("cqs.patterns.pattern:combine", "", "['&', b'', b'']", [], [HANDLE, HANDLE]),
        ("cqs.patterns.positions:sliding_window", "right", "[{}, None]", [3], []),
    ],
    ids=lambda each: each[0].partition(":")[2],
)
def test_the_operator_of_patterns_passes_opcheck(arguments):
    from cqs.executors import operators  # noqa: F401

    opcheck(torch.ops.cqs.made.default, arguments)


@pytest.mark.parametrize(
    "maker", ["os:system", "builtins:eval", "cqs.files:read_lines", "cqs.patterns.text:_evaluate"]
)
def test_the_operator_of_patterns_calls_nothing_else(maker):
    from cqs.executors import operators  # noqa: F401

    with pytest.raises(ValueError, match=f"maker must be a function that makes .* '{maker}'"):
        torch.ops.cqs.made(maker, "", "['exit 1']", [], [])


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [600, 10_000])
def test_patterns_of_many_steps_leave_nothing_behind(num_steps):
    """A new ``cu_seqlens`` in each step of training, without a graph that is compiled again."""

    def attend(query, pattern):
        return cqs.attention(query, query, query, pattern=pattern).sum()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    query = torch.randn(1, 1, 40, 1, requires_grad=True)

    def train(first, stop):
        for number in range(first, stop):
            ends = sorted({number // 38**place % 38 + 1 for place in range(3)})
            compiled(query, documents([0, *ends, 40])).backward()
        gc.collect()
        return len(_memories), len(gc.get_objects())

    train(0, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        ends = 1, 400, (400 + num_steps) // 2, num_steps  # the first fill the caches
        handles, objects = zip(*starmap(train, pairwise(ends)), strict=True)
        pattern = documents([0, 9, 40])
        torch.testing.assert_close(compiled(query, pattern), attend(query, pattern))
    assert len(set(handles)) == 1
    # Other threads may import modules meanwhile; a leak is seen in every round.
    assert min(after - before for before, after in pairwise(objects)) < 200


def relative(score, batch, head, query, key):
    return score + 0.01 * (query - key)


WRONG = {
    "key": (lambda key: {"key": key[..., :4]}, "key must have the head_dim of query"),
    "num_tasks": (lambda key: {"num_tasks": 0}, "num_tasks must be at least 1"),
    "pattern": (lambda key: {"pattern": from_mask(MASK[:9, :9])}, "requires lengths"),
    "score_mod": (
        lambda key: {"scores": cqs.Scores(score_mod=relative)},
        "attention of cqs runs outside of the graph",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_argument(change, message):
    def attend(query, key, value):
        return cqs.attention(**{"query": query, "key": key, "value": value} | change(key))

    with pytest.raises(Exception, match=message):
        torch.compile(attend, backend="eager", fullgraph=True)(*operands())


def test_a_graph_breaks_at_a_call_with_a_score_function():
    scores = cqs.Scores(score_mod=relative)

    def attend(query, key, value):
        return cqs.attention(query.sin(), key, value, scores=scores)

    assert torch.equal(torch.compile(attend, backend="eager")(*operands()), attend(*operands()))
