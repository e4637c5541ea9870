"""Whatever is wrong with an argument, the error is of the right type and quotes the argument."""

from fractions import Fraction
from itertools import count
from operator import attrgetter

import numpy as np
import pytest
import torch
from option_table import parameters

import cqs
from cqs.arguments import ADVICE
from cqs.patterns import causal, from_mask, per_head, sliding_window
from cqs.scheduler import (
    AttentionShape,
    Grid2D,
    Hosts,
    Quorums,
    check_interest_set,
    load_interest_set,
)


def tensor(*shape, **options):
    return torch.zeros(shape or (2, 4, 10, 8), **options)


def attend(**changes):
    """Call ``cqs.attention`` on valid arguments with changes."""

    def call():
        arguments = {"query": tensor(), "key": tensor(), "value": tensor(), "num_tasks": 3}
        cqs.attention(**{**arguments, **changes})

    return call


def plan(*args, **options):
    return lambda: cqs.make_plan(*(args or (70,)), **{"num_tasks": 7, **options})


def check(elements, num_tasks=7):
    return lambda: check_interest_set(elements, num_tasks)


def shape(**changes):
    return lambda: AttentionShape(**{"num_heads": 8, "head_dim": 64, **changes})


def masked(mask, **changes):
    """Call ``cqs.attention`` with an attn_mask, for two KV heads."""
    return attend(attn_mask=mask, key=tensor(2, 2, 10, 8), value=tensor(2, 2, 10, 8), **changes)


def scored(**options):
    return attend(scores=cqs.Scores(**options))


def modified(score_mod):
    return scored(score_mod=score_mod)


def choose(score, batch, head, query, key):
    return score if query >= key else -score


JAGGED = torch.nested.nested_tensor([tensor(4, 10, 8)] * 2, layout=torch.jagged)
BY_HEAD = per_head([[causal(), sliding_window(3)]])
META, WIDE = tensor(device="meta"), tensor(dtype=torch.float64)
BAD = [
    # Masks.
    (masked([[True]]), TypeError, "attn_mask must be a torch.Tensor, got list"),
    (masked(tensor(10, 10, dtype=int)), TypeError, "attn_mask .* got torch.int64"),
    (masked(tensor(10, 10).to_sparse()), TypeError, "attn_mask .* got layout torch.sparse_coo"),
    (masked(tensor(1, 1, 1, 10, 10)), ValueError, r"attn_mask .* got \[1, 1, 1, 10, 10\]"),
    (masked(tensor(9, 10)), ValueError, r"attn_mask .* \[2, 4, 10, 10\], got \[9, 10\]"),
    (masked(tensor(2, 2, 10, 10)), ValueError, r"attn_mask .*\[2, 2, 10, 10\]"),
    (masked(tensor(10, 10, device="meta")), ValueError, "attn_mask .* got meta"),
    (masked(tensor(10, 10), scores=cqs.Scores(bias=tensor(10, 10))), ValueError, "torch.float32"),
    (masked(None, enable_gqa=1), TypeError, "enable_gqa must be a bool, got 1"),
    (masked(None, enable_gqa=False), ValueError, "num_kv_heads .* got 2"),
    # Scores.
    (attend(scores={"softcap": 1.0}), TypeError, "scores must .* got dict"),
    (scored(sinks=1.0), TypeError, r"scores\.sinks must be a torch\.Tensor, got float"),
    (scored(sinks=torch.tensor(1.0)), ValueError, r"scores\.sinks .* got \[\]"),
    (scored(sinks=tensor(4).to_sparse()), TypeError, r"scores\.sinks .* dense"),
    (scored(softcap=True), TypeError, r"softcap must be a number .* got True"),
    (scored(softcap=1e300), ValueError, r"softcap must be between 1e-30 and 1e\+30, got 1e\+300"),
    (scored(alibi_slopes=tensor(2)), ValueError, r"alibi_slopes .* got \[2\]"),
    (scored(alibi_slopes=tensor(4, device="meta")), ValueError, "alibi_slopes .* got meta"),
    (scored(bias=[[0.0]]), TypeError, r"scores\.bias must be a torch\.Tensor, got list"),
    (scored(bias=tensor(10, 10, dtype=int)), TypeError, r"scores\.bias .* torch.int64"),
    (scored(bias=tensor(10, 10, dtype=bool)), TypeError, "torch.bool: pass pattern=.*from_mask"),
    (scored(bias=tensor(9, 10)), ValueError, r"scores\.bias .* got \[9, 10\]"),
    (scored(bias=tensor(10, 10, device="meta")), ValueError, r"scores\.bias .* got meta"),
    (modified(3), TypeError, r"score_mod must be None or a function .* got 3"),
    (modified(lambda s: s), TypeError, r"score_mod must .* got .*lambda.*: too many positional"),
    (modified(lambda s, *_: 0.5), TypeError, r"score_mod must return .* got float"),
    (modified(lambda s, *_: s * torch.ones(2)), TypeError, r"return .* scalar .* shape \[2\]"),
    (modified(choose), ValueError, r"scores\.score_mod .* use torch.where in place of if"),
    (modified(lambda s, *_: s * s.item()), ValueError, r"score_mod must .* no .item"),
    (modified(lambda s, *_: torch.from_numpy(np.asarray(s))), ValueError, "PyTorch's functions"),
    (modified(lambda s, *_: s + torch.rand(())), ValueError, "no .* random numbers"),
    (masked(tensor(10, 10), backend="cudnn"), NotImplementedError, "'cudnn' .* with bias"),
    # What is no tensor, or no tensor that attention is defined for.
    (attend(query=[[1.0]]), TypeError, "query must be a torch.Tensor, got list"),
    (attend(key=None), TypeError, "key must be a torch.Tensor, got NoneType"),
    (attend(value=np.zeros((2, 4, 10, 8))), TypeError, "value .* got ndarray"),
    (attend(query=tensor().to_sparse()), TypeError, "query .* torch.sparse_coo"),
    (attend(query=JAGGED), TypeError, "query must be a dense tensor, got layout torch.jagged"),
    (attend(key=tensor(dtype=torch.complex64)), TypeError, "key .* torch.complex64"),
    (attend(value=tensor(dtype=torch.float8_e4m3fn)), TypeError, "value .* torch.float8_e4m3fn"),
    (attend(query=META, key=META, value=META), NotImplementedError, "query must be .* got meta"),
    # Tensors that do not fit together.
    (attend(key=tensor(dtype=torch.float64)), ValueError, "key .* got torch.float64"),
    (attend(value=tensor(dtype=torch.bfloat16)), ValueError, "value .* got torch.bfloat16"),
    (attend(key=tensor(device="meta")), (ValueError, NotImplementedError), "key .* meta"),
    (attend(key=tensor(3, 4, 10, 8)), ValueError, "key .* batch .* 2, got 3"),
    (attend(query=tensor(1, 4, 10, 8), value=tensor(3, 4, 10, 8)), ValueError, "value .* got 3"),
    (attend(key=tensor(2, 4, 10, 9)), ValueError, "key must have the head_dim of query, 8, got 9"),
    (attend(value=tensor(2, 4, 11, 8)), ValueError, r"key and value .* \(2, 4, 11, 8\)"),
    (attend(value=tensor(2, 2, 10, 8)), ValueError, r"key and value .* \(2, 2, 10, 8\)"),
    (attend(key=tensor(2, 3, 10, 8), value=tensor(2, 3, 10, 8)), ValueError, "multiple .* 4 and 3"),
    (attend(query=tensor(2, 0, 10, 8)), ValueError, "num_heads .* got 0 and 4"),
    (attend(value=tensor(2, 4, 10, 0)), ValueError, r"value .* \(2, 4, 10, 0\)"),
    # Options of attention.
    (attend(pattern=[[causal()]]), TypeError, "pattern must be .* got list"),
    (attend(is_causal=1), TypeError, "is_causal must be a bool, got 1"),
    (attend(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    (attend(scale="0.5"), TypeError, "scale must be a number or None, got '0.5'"),
    (attend(scale=10**400), ValueError, "scale must be finite, got 10+"),
    (attend(num_tasks=0), ValueError, "num_tasks must be at least 1, got 0"),
    (attend(num_tasks=7.0), TypeError, "num_tasks .* integer, got 7.0"),
    (attend(num_tasks=True), TypeError, "num_tasks .* integer, got True"),
    (attend(plan=Quorums((0, 1, 3))), ValueError, r"interest_set must lie in range\(3\), got 3"),
    (attend(num_tasks=7, plan=Quorums((0, 1, 2))), ValueError, "modulo 7: .* differ by 3"),
    (attend(backend="flash2"), ValueError, "backend .* got 'flash2'"),
    (attend(query=WIDE, key=WIDE, value=WIDE, backend="cpu"), NotImplementedError, "float64"),
    (attend(value=tensor(2, 4, 10, 6), backend="cpu"), NotImplementedError, "backend .* 8 and 6"),
    (attend(backend="cudnn"), NotImplementedError, "backend .* got cpu"),
    (attend(memory_budget=None), TypeError, r"memory_budget: call cqs\.streaming\.attention"),
    (attend(qeury=tensor()), TypeError, "unexpected keyword argument 'qeury'"),
    # Dropout.
    (attend(dropout_p=1.0), ValueError, r"dropout_p must be in \[0, 1\)"),
    (attend(dropout_p=-0.1), ValueError, r"dropout_p must be in \[0, 1\)"),
    (attend(dropout_p=float("nan")), ValueError, r"dropout_p must be in \[0, 1\)"),
    (attend(dropout_p=0.5, seed=-1), ValueError, "seed must be at least 0"),
    (attend(dropout_p=0.5, seed=1.5), TypeError, "seed must be an integer"),
    # Plans.
    (plan(-1), ValueError, "seqlen_q must be at least 0, got -1"),
    (plan(5, -2), ValueError, "seqlen_kv must be at least 0, got -2"),
    (plan(1e6), TypeError, "seqlen_q must be an integer, got 1000000.0"),
    (plan(is_causal="no"), TypeError, "is_causal must be a bool, got 'no'"),
    (plan(kind="ring"), ValueError, "kind must be .* got 'ring'"),
    (plan(kind=(0, 1, 3)), TypeError, r"kind must be .* got \(0, 1, 3\)"),
    (plan(kind=Grid2D(2, 3)), ValueError, "number of tasks, 7, got .* 2 .* 3"),
    (lambda: Grid2D(0, 7), ValueError, "query_groups must be at least 1, got 0"),
    (plan(kind=Hosts(Quorums(), 2)), ValueError, "size .* 7, got 2"),
    (lambda: Hosts("rows", 2), TypeError, "outer must be .* got 'rows'"),
    (lambda: cqs.make_plan(70, num_tasks=7).task(7), ValueError, "index .* got 7"),
    (lambda: cqs.make_plan(70, num_tasks=7).task(-1), ValueError, r"range\(7\), got -1"),
    (plan(pattern="causal()"), TypeError, "pattern must be .*Pattern or None, got 'causal"),
    (lambda: cqs.Plan.from_json("{}", 3), TypeError, "pattern must be .* None, got 3"),
    (plan(pattern=BY_HEAD), ValueError, "differs by head"),
    (plan(pattern=BY_HEAD, is_causal=True), ValueError, "differs by head"),
    (plan(pattern=from_mask(np.ones((4, 4), dtype=bool))), ValueError, "requires lengths"),
    # Interest sets.
    (check([]), ValueError, r"interest_set must contain 0, got \(\)"),
    (check([0, 1, 1, 3]), ValueError, r"repeats an element: \(0, 1, 1, 3\)"),
    (check([0, -1, 3]), ValueError, r"in range\(7\), got -1"),
    (check([0, True, 3]), TypeError, "must hold integers, got True"),
    (check([0, (1, 3)]), TypeError, r"must hold integers, got \(1, 3\)"),
    (lambda: load_interest_set(0), ValueError, "num_tasks .* got 0"),
    (check([0], 0), ValueError, "num_tasks must be at least 1, got 0"),
    (check([0], 10**400), ValueError, "num_tasks must be at most 262144, got "),
    (check(range(10**12), 2**18), ValueError, "interest_set must have at most 4096 elements"),
    (check(count(), 2**18), ValueError, "interest_set must have at most 4096 elements"),
    (check([0, 10**5000]), ValueError, r"must lie in range\(7\), got 16610 bits"),
    (check(np.array([False, True])), TypeError, "integers, got np.False_"),
    (check(np.array([[0, 1, 3]])), TypeError, r"got array\(\[0, 1, 3\]\)"),
    # Shapes of which costs are predicted.
    (shape(head_dim=-5), ValueError, "head_dim must be at least 1, got -5"),
    (shape(batch=-1), ValueError, "batch must be at least 0, got -1"),
    (shape(itemsize=2.0), TypeError, "itemsize must be an integer, got 2.0"),
    # Plans in JSON.
    (lambda: cqs.Plan.from_json("plan"), ValueError, "Expecting value"),
    (lambda: cqs.Plan.from_json('{"num_tasks": 7'), ValueError, "delimiter|Expecting"),
    (lambda: cqs.Plan.from_json("[1, 2]"), ValueError, "not a plan"),
    (lambda: cqs.Plan.from_json("{}"), ValueError, "not a plan: .*version"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_is_refused_with_the_value(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "name",
    [
        *("attention", "flex_attention", "distributed.attention", "streaming.attention"),
        pytest.param("Cluster.attention", marks=pytest.mark.ray),
        pytest.param("Cluster.submit", marks=pytest.mark.ray),
    ],
)
def test_arguments_of_other_libraries_are_answered(name):
    """Whatever else is missing: q, k and v are keywords elsewhere."""
    function = attrgetter(name)(cqs)
    own = parameters(function)
    assert {"query", "key", "value"} <= set(own)
    for name in set(ADVICE) - {*own, *["strategy"] * ("links" in own)}:
        with pytest.raises(TypeError, match=rf"{function.__name__}.* {name}: \w+"):
            function(**{name: None})


@pytest.mark.parametrize("shape", [(4, 10, 8), (3, 2, 4, 10, 8)])
def test_the_remedy_for_other_numbers_of_dimensions_works(shape):
    query, key, value = torch.randn(3, *shape)
    with pytest.raises(ValueError, match="query .* got shape") as raised:
        cqs.attention(query, key, value)
    assert "unsqueeze(1)" in str(raised.value) and "flatten(0, -4)" in str(raised.value)
    fit = [
        each.unsqueeze(1) if each.ndim == 3 else each.flatten(0, -4) for each in (query, key, value)
    ]
    output = cqs.attention(*fit).view(shape)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(output, dense)


def test_bad_arguments_are_refused_before_anything_is_computed(monkeypatch):
    from cqs.executors import local
    from cqs.worker import worker

    for module in (worker, local):
        monkeypatch.setattr(module, "attend_call", lambda *_: pytest.fail("it was computed"))
    for changes in (
        {"backend": "cudnn"},
        {"num_tasks": 7, "plan": Quorums((0, 1, 2))},
        {"scale": float("nan")},
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            attend(**changes)()


def test_numbers_of_numpy_are_numbers():
    whole = cqs.make_plan(np.int64(70), np.uint8(90), num_tasks=np.int32(7), is_causal=np.True_)
    assert whole == cqs.make_plan(70, 90, num_tasks=7, is_causal=True)
    assert cqs.Plan.from_json(whole.to_json()) == whole
    interest_set = np.array([0, 2, 3], np.int16)
    chosen = cqs.make_plan(70, num_tasks=7, kind=Quorums(interest_set))
    assert chosen == cqs.make_plan(70, num_tasks=7, kind=Quorums([0, 2, 3]))
    assert cqs.Plan.from_json(chosen.to_json()) == chosen
    assert AttentionShape(np.int64(8), np.int64(64)) == AttentionShape(8, 64)


def test_options_of_numpy_are_options():
    query, key, value = torch.randn(3, 1, 2, 30, 8)
    expected = cqs.attention(query, key, value, is_causal=True, scale=0.5, num_tasks=7)
    options = {
        "is_causal": np.True_,
        "num_tasks": np.int64(7),
        "plan": Quorums(np.array([0, 1, 3])),
    }
    for scale in (np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)):
        assert torch.equal(cqs.attention(query, key, value, scale=scale, **options), expected)
