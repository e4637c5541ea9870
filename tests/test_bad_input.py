"""Whatever is wrong with an argument, the error is of the right type and quotes the argument."""

import json
from fractions import Fraction
from inspect import signature

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import cqs
from cqs.arguments import ADVICE
from cqs.patterns import causal
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


def read(**changes):
    """Read a plan from JSON, valid except the changes."""
    text = cqs.make_plan(70, num_tasks=7).to_json(list_tasks=True)
    return lambda: cqs.Plan.from_json(json.dumps({**json.loads(text), **changes}))


def read_text(text):
    return lambda: cqs.Plan.from_json(text)


def masked(mask, **changes):
    """Call ``cqs.attention`` with an attn_mask, for two KV heads."""
    return attend(attn_mask=mask, key=tensor(2, 2, 10, 8), value=tensor(2, 2, 10, 8), **changes)


def scored(**options):
    return attend(scores=cqs.Scores(**options))


def modified(score_mod, **changes):
    return attend(scores=cqs.Scores(score_mod=score_mod), **changes)


def choose(score, batch, head, query, key):
    return score if query >= key else -score


def fake(*shape):
    return FakeTensorMode().from_tensor(tensor(*shape))


def jagged():
    return torch.nested.nested_tensor([tensor(10, 10)] * 2, layout=torch.jagged)


MASKS = {
    "mask-list": (masked([[True]]), TypeError, "attn_mask must be a tensor or None, got list"),
    "mask-bool": (masked(True), TypeError, "attn_mask must be a tensor or None, got bool"),
    "mask-numpy": (masked(np.ones((10, 10))), TypeError, "attn_mask .* got ndarray"),
    "mask-pattern": (masked(causal()), TypeError, "attn_mask must be a tensor or None"),
    "mask-int": (masked(tensor(10, 10, dtype=int)), TypeError, "attn_mask .* got torch.int64"),
    "mask-complex": (
        masked(tensor(10, 10, dtype=torch.complex64)),
        TypeError,
        "attn_mask must be bool, .* got torch.complex64",
    ),
    "mask-sparse": (
        masked(tensor(10, 10).to_sparse()),
        TypeError,
        "attn_mask must be a dense tensor, got layout torch.sparse_coo",
    ),
    "mask-nested": (lambda: masked(jagged())(), TypeError, "attn_mask .* got layout torch.jagged"),
    "mask-fake": (lambda: masked(fake(10, 10))(), TypeError, "attn_mask .* got FakeTensor"),
    "mask-rank-5": (
        masked(tensor(1, 1, 1, 10, 10)),
        ValueError,
        r"attn_mask must be broadcastable .* got \[1, 1, 1, 10, 10\]",
    ),
    "mask-rows": (
        masked(tensor(9, 10)),
        ValueError,
        r"attn_mask .* \[2, 4, 10, 10\], got \[9, 10\]",
    ),
    "mask-columns": (masked(tensor(10, 11, dtype=bool)), ValueError, r"attn_mask .*\[10, 11\]"),
    "mask-kv-heads": (masked(tensor(2, 2, 10, 10)), ValueError, r"attn_mask .*\[2, 2, 10, 10\]"),
    "mask-batch": (masked(tensor(3, 1, 1, 10)), ValueError, r"attn_mask .* got \[3, 1, 1, 10\]"),
    "mask-empty": (masked(tensor(0, 10)), ValueError, r"attn_mask .* got \[0, 10\]"),
    "mask-device": (
        masked(tensor(10, 10, device="meta")),
        ValueError,
        "attn_mask must be on the device of query, cpu, got meta",
    ),
    "mask-and-bias": (
        masked(tensor(10, 10), scores=cqs.Scores(bias=tensor(10, 10))),
        ValueError,
        "attn_mask must be boolean or None with scores.bias, got torch.float32",
    ),
    "mask-and-scores": (masked(tensor(10, 10), scores=5), TypeError, "scores must .* got int"),
    "mask-and-pattern": (
        masked(tensor(10, 10, dtype=bool), pattern="causal"),
        TypeError,
        "pattern must be a cqs.patterns.Pattern, got str",
    ),
    "mask-backend": (
        masked(tensor(10, 10), backend="cudnn"),
        NotImplementedError,
        "backend 'cudnn' does not support scores with bias",
    ),
    "gqa-int": (masked(None, enable_gqa=1), TypeError, "enable_gqa must be a bool, got 1"),
    "gqa-none": (masked(None, enable_gqa=None), TypeError, "enable_gqa must be a bool, got None"),
    "gqa-false": (
        masked(None, enable_gqa=False),
        ValueError,
        "num_kv_heads must be 1 or num_heads, 4, without enable_gqa, got 2",
    ),
}
SCORES = {
    "scores-dict": (attend(scores={"softcap": 1.0}), TypeError, "scores must .* got dict"),
    "scores-class": (attend(scores=cqs.Scores), TypeError, "scores must .* got type"),
    "scores-function": (attend(scores=choose), TypeError, "scores must .* got function"),
    "sinks-number": (scored(sinks=1.0), TypeError, r"scores\.sinks must be a tensor .* got float"),
    "sinks-0d": (scored(sinks=torch.tensor(1.0)), ValueError, r"scores\.sinks .* got \[\]"),
    "sinks-sparse": (scored(sinks=tensor(4).to_sparse()), TypeError, r"scores\.sinks .* dense"),
    "softcap-negative": (scored(softcap=-1), ValueError, r"softcap must be positive .* got -1"),
    "softcap-nan": (scored(softcap=float("nan")), ValueError, r"softcap .* got nan"),
    "softcap-bool": (scored(softcap=True), TypeError, r"softcap must be a number .* got True"),
    "softcap-tensor": (scored(softcap=torch.tensor(1.0)), TypeError, r"softcap .* got tensor"),
    "softcap-beyond-float32": (
        scored(softcap=1e300),
        ValueError,
        r"softcap must be between 1e-30 and 1e\+30, got 1e\+300",
    ),
    "softcap-tiny": (scored(softcap=1e-40), ValueError, "softcap must be between .* got 1e-40"),
    "softcap-huge": (scored(softcap=10**400), ValueError, "softcap must be positive and finite"),
    "slopes-list": (scored(alibi_slopes=[1.0] * 4), TypeError, r"alibi_slopes .* got list"),
    "slopes-int": (scored(alibi_slopes=tensor(4, dtype=int)), TypeError, "alibi_slopes .*int64"),
    "slopes-number": (scored(alibi_slopes=torch.tensor(1.0)), ValueError, r"slopes .* got \[\]"),
    "slopes-kv-heads": (
        scored(alibi_slopes=tensor(2)),
        ValueError,
        r"alibi_slopes must be .* \[4\] or \[2, 4\], got \[2\]",
    ),
    "slopes-batch": (scored(alibi_slopes=tensor(3, 4)), ValueError, r"slopes .* got \[3, 4\]"),
    "slopes-rank-3": (scored(alibi_slopes=tensor(2, 4, 1)), ValueError, r"slopes .* \[2, 4, 1\]"),
    "slopes-device": (
        scored(alibi_slopes=tensor(4, device="meta")),
        ValueError,
        "alibi_slopes must be on the device of query, cpu, got meta",
    ),
    "bias-list": (scored(bias=[[0.0]]), TypeError, r"scores\.bias must be a tensor .* got list"),
    "bias-number": (scored(bias=0.5), TypeError, r"scores\.bias must be a tensor .* got float"),
    "bias-int": (scored(bias=tensor(10, 10, dtype=int)), TypeError, r"scores\.bias .* torch.int64"),
    "bias-bool": (
        scored(bias=tensor(10, 10, dtype=bool)),
        TypeError,
        r"scores\.bias must be floating-point, got torch.bool: pass pattern=.*from_mask",
    ),
    "bias-float8": (
        scored(bias=tensor(10, 10, dtype=torch.float8_e4m3fn)),
        TypeError,
        r"scores\.bias .* got torch.float8_e4m3fn",
    ),
    "bias-complex": (
        scored(bias=tensor(10, 10, dtype=torch.complex64)),
        TypeError,
        r"scores\.bias .* torch.complex64",
    ),
    "bias-sparse": (scored(bias=tensor(10, 10).to_sparse()), TypeError, r"bias .*sparse_coo"),
    "bias-mkldnn": (scored(bias=tensor(10, 10).to_mkldnn()), TypeError, r"bias .* torch._mkldnn"),
    "bias-nested": (lambda: scored(bias=jagged())(), TypeError, r"bias .* layout torch.jagged"),
    "bias-fake": (lambda: scored(bias=fake(10, 10))(), TypeError, r"bias .* got FakeTensor"),
    "bias-rank-5": (scored(bias=tensor(1, 1, 1, 10, 10)), ValueError, r"\[1, 1, 1, 10, 10\]"),
    "bias-rows": (
        scored(bias=tensor(9, 10)),
        ValueError,
        r"scores\.bias must be broadcastable to .* \[2, 4, 10, 10\], got \[9, 10\]",
    ),
    "bias-columns": (scored(bias=tensor(10, 11)), ValueError, r"bias .* got \[10, 11\]"),
    "bias-heads": (scored(bias=tensor(2, 10, 10)), ValueError, r"bias .* got \[2, 10, 10\]"),
    "bias-batch": (scored(bias=tensor(3, 1, 1, 1)), ValueError, r"bias .* got \[3, 1, 1, 1\]"),
    "bias-empty": (scored(bias=tensor(10, 0)), ValueError, r"bias .* got \[10, 0\]"),
    "bias-device": (
        scored(bias=tensor(10, 10, device="meta")),
        ValueError,
        r"scores\.bias must be on the device of query, cpu, got meta",
    ),
    "mod-number": (modified(3), TypeError, r"score_mod must be a function or None, got 3"),
    "mod-tensor": (modified(tensor(3)), TypeError, r"score_mod must be a function .* got tensor"),
    "mod-few": (modified(lambda s: s), TypeError, r"score_mod must .* got one of \(s\)"),
    "mod-many": (
        modified(lambda s, b, h, i, j, x: s),
        TypeError,
        r"score_mod must be a function of score, .* got one of \(s, b, h, i, j, x\)",
    ),
    "mod-none": (modified(lambda s, *_: None), TypeError, r"score_mod must return .* NoneType"),
    "mod-float": (modified(lambda s, *_: 0.5), TypeError, r"score_mod must return .* got float"),
    "mod-tuple": (modified(lambda s, *_: (s, s)), TypeError, r"score_mod must return .* got tuple"),
    "mod-shape": (
        modified(lambda s, *_: s * torch.ones(2)),
        TypeError,
        r"score_mod must return a floating-point scalar .* torch.float32 of shape \[2\]",
    ),
    "mod-mask": (
        modified(lambda s, b, h, i, j: i >= j),
        TypeError,
        r"score_mod must return .* got torch.bool of shape \[\]",
    ),
    "mod-int": (modified(lambda s, b, h, i, j: i - j), TypeError, "score_mod must .* torch.int64"),
    "mod-complex": (modified(lambda s, *_: s * 1j), TypeError, "score_mod must .*complex64"),
    "mod-if": (
        modified(choose),
        ValueError,
        r"scores\.score_mod .* use torch.where in place of if",
    ),
    "mod-item": (modified(lambda s, *_: s * s.item()), ValueError, r"score_mod must .* no .item"),
    "mod-numpy": (
        modified(lambda s, *_: torch.from_numpy(np.sin(np.asarray(s)))),
        ValueError,
        r"score_mod must be made of PyTorch's functions",
    ),
    "mod-random": (
        modified(lambda s, *_: s + torch.rand(())),
        ValueError,
        r"score_mod must .* no .* random numbers",
    ),
    "mod-backend": (
        modified(lambda s, *_: s, backend="cpu"),
        NotImplementedError,
        "backend 'cpu' does not support scores with score_mod",
    ),
    "bias-backend": (
        attend(scores=cqs.Scores(bias=tensor(10, 10, requires_grad=True)), backend="cpu"),
        NotImplementedError,
        "backend 'cpu' does not support scores with gradient of bias",
    ),
    "slopes-backend": (
        attend(scores=cqs.Scores(alibi_slopes=tensor(4)), backend="cudnn"),
        NotImplementedError,
        "backend 'cudnn'",
    ),
}
BAD = {
    **MASKS,
    **SCORES,
    # What is no tensor, or no tensor that attention is defined for.
    "query-list": (attend(query=[[1.0]]), TypeError, "query must be a torch.Tensor, got list"),
    "key-none": (attend(key=None), TypeError, "key must be a torch.Tensor, got NoneType"),
    "value-numpy": (attend(value=np.zeros((2, 4, 10, 8))), TypeError, "value .* got ndarray"),
    "query-sparse": (attend(query=tensor().to_sparse()), TypeError, "query .* torch.sparse_coo"),
    "key-mkldnn": (attend(key=tensor().to_mkldnn()), TypeError, "key .* torch._mkldnn"),
    "query-nested": (
        lambda: attend(
            query=torch.nested.nested_tensor([tensor(4, 10, 8)] * 2, layout=torch.jagged)
        )(),
        TypeError,
        "query must be a dense tensor, got layout torch.jagged",
    ),
    "query-fake": (
        lambda: attend(query=FakeTensorMode().from_tensor(tensor()))(),
        TypeError,
        "query must be a plain torch.Tensor, got FakeTensor",
    ),
    "query-rank-3": (attend(query=tensor(4, 10, 8)), ValueError, r"query .* \(4, 10, 8\)"),
    "key-rank-5": (attend(key=tensor(1, 2, 4, 10, 8)), ValueError, r"key .* \(1, 2, 4, 10, 8\)"),
    "value-rank-0": (attend(value=torch.tensor(1.0)), ValueError, r"value .* got shape \(\)"),
    "query-int": (attend(query=tensor(dtype=torch.int64)), TypeError, "query .* torch.int64"),
    "query-bool": (attend(query=tensor(dtype=torch.bool)), TypeError, "query .* torch.bool"),
    "key-complex": (attend(key=tensor(dtype=torch.complex64)), TypeError, "key .* torch.complex64"),
    "value-float8": (
        attend(value=tensor(dtype=torch.float8_e4m3fn)),
        TypeError,
        "value .* got torch.float8_e4m3fn",
    ),
    "all-meta": (
        attend(query=tensor(device="meta"), key=tensor(device="meta"), value=tensor(device="meta")),
        NotImplementedError,
        "query must be on the CPU or a GPU, got meta",
    ),
    # Tensors that do not fit together.
    "key-other-dtype": (
        attend(key=tensor(dtype=torch.float64)),
        ValueError,
        "key must have the dtype of query, torch.float32, got torch.float64",
    ),
    "value-other-dtype": (
        attend(value=tensor(dtype=torch.bfloat16)),
        ValueError,
        "value must have the dtype of query, torch.float32, got torch.bfloat16",
    ),
    "key-other-device": (
        attend(key=tensor(device="meta")),
        (ValueError, NotImplementedError),
        "key .* meta",
    ),
    "key-other-batch": (attend(key=tensor(3, 4, 10, 8)), ValueError, "key .* batch .* 2, got 3"),
    "value-other-batch": (
        attend(query=tensor(1, 4, 10, 8), value=tensor(3, 4, 10, 8)),
        ValueError,
        "value .* batch .* 2, got 3",
    ),
    "value-empty-batch": (attend(value=tensor(0, 4, 10, 8)), ValueError, "value .* 2, got 0"),
    "key-other-head-dim": (
        attend(key=tensor(2, 4, 10, 9)),
        ValueError,
        "key must have the head_dim of query, 8, got 9",
    ),
    "value-other-seqlen": (
        attend(value=tensor(2, 4, 11, 8)),
        ValueError,
        r"key and value .* \(2, 4, 10, 8\) and \(2, 4, 11, 8\)",
    ),
    "value-other-heads": (
        attend(value=tensor(2, 2, 10, 8)),
        ValueError,
        r"key and value .* \(2, 4, 10, 8\) and \(2, 2, 10, 8\)",
    ),
    "heads-not-divisible": (
        attend(key=tensor(2, 3, 10, 8), value=tensor(2, 3, 10, 8)),
        ValueError,
        "multiple of num_kv_heads, got 4 and 3",
    ),
    "more-key-heads": (
        attend(key=tensor(2, 8, 10, 8), value=tensor(2, 8, 10, 8)),
        ValueError,
        "multiple of num_kv_heads, got 4 and 8",
    ),
    "no-heads": (attend(query=tensor(2, 0, 10, 8)), ValueError, "num_heads .* got 0 and 4"),
    "no-key-heads": (
        attend(key=tensor(2, 0, 10, 8), value=tensor(2, 0, 10, 8)),
        ValueError,
        "num_kv_heads, got 4 and 0",
    ),
    "value-dim-0": (attend(value=tensor(2, 4, 10, 0)), ValueError, r"value .* \(2, 4, 10, 0\)"),
    # Options of attention.
    "pattern-list": (attend(pattern=[[causal()]]), TypeError, "pattern must be .* got list"),
    "pattern-tensor": (attend(pattern=torch.ones(10, 10)), TypeError, "pattern .* got Tensor"),
    "is-causal-int": (attend(is_causal=1), TypeError, "is_causal must be a bool, got 1"),
    "is-causal-none": (attend(is_causal=None), TypeError, "is_causal must be a bool, got None"),
    "is-causal-text": (attend(is_causal="yes"), TypeError, "is_causal .* got 'yes'"),
    "scale-nan": (attend(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    "scale-inf": (attend(scale=float("-inf")), ValueError, "scale must be finite, got -inf"),
    "scale-text": (attend(scale="0.5"), TypeError, "scale must be a number or None, got '0.5'"),
    "scale-bool": (attend(scale=True), TypeError, "scale must be a number or None, got True"),
    "scale-complex": (attend(scale=1j), TypeError, "scale must be a number or None, got 1j"),
    "scale-tensor": (attend(scale=torch.tensor(1.0)), TypeError, r"scale .* got tensor\(1\.\)"),
    "scale-huge": (attend(scale=10**400), ValueError, "scale must be finite, got 10+"),
    "workers-0": (attend(num_tasks=0), ValueError, "num_tasks must be at least 1, got 0"),
    "workers-negative": (attend(num_tasks=-7), ValueError, "num_tasks .* got -7"),
    "workers-float": (attend(num_tasks=7.0), TypeError, "num_tasks .* integer, got 7.0"),
    "workers-bool": (attend(num_tasks=True), TypeError, "num_tasks .* integer, got True"),
    "workers-text": (attend(num_tasks="7"), TypeError, "num_tasks .* integer, got '7'"),
    "workers-list": (attend(num_tasks=[7]), TypeError, r"num_tasks .* integer, got \[7\]"),
    "workers-numpy-bool": (attend(num_tasks=np.True_), TypeError, "num_tasks .* got np.True_"),
    "workers-numpy-float": (attend(num_tasks=np.float64(7)), TypeError, r"got np.float64\(7.0\)"),
    "workers-tensor-bool": (attend(num_tasks=torch.tensor(True)), TypeError, r"tensor\(True\)"),
    "workers-numpy-0": (attend(num_tasks=np.int64(0)), ValueError, "num_tasks .* got 0"),
    "scale-numpy-bool": (attend(scale=np.True_), TypeError, "scale .* got np.True_"),
    "scale-numpy-nan": (attend(scale=np.float32("nan")), ValueError, "finite, got nan"),
    "scale-minus-huge": (attend(scale=-(10**400)), ValueError, "scale must be finite, got -10+"),
    "is-causal-numpy-int": (attend(is_causal=np.int64(1)), TypeError, r"got np.int64\(1\)"),
    "is-causal-array": (attend(is_causal=np.array([True])), TypeError, r"got array\(\[ True\]\)"),
    "set-for-others": (
        attend(plan=Quorums((0, 1, 3))),
        ValueError,
        r"interest_set must lie in range\(3\), got 3",
    ),
    "set-no-cover": (
        attend(num_tasks=7, plan=Quorums((0, 1, 2))),
        ValueError,
        r"\(0, 1, 2\) is no difference cover modulo 7: no two elements differ by 3",
    ),
    "backend-unknown": (attend(backend="flash2"), ValueError, "backend .* got 'flash2'"),
    "backend-empty": (attend(backend=""), ValueError, "backend .* got ''"),
    "backend-number": (attend(backend=5), (TypeError, ValueError), "backend .* got 5"),
    "backend-list": (attend(backend=["cpu"]), (TypeError, ValueError), r"backend .*\['cpu'\]"),
    "backend-cpu-float64": (
        attend(
            query=tensor(dtype=torch.float64),
            key=tensor(dtype=torch.float64),
            value=tensor(dtype=torch.float64),
            backend="cpu",
        ),
        NotImplementedError,
        "backend 'cpu' requires .* got torch.float64",
    ),
    "backend-cpu-value-dim": (
        attend(value=tensor(2, 4, 10, 6), backend="cpu"),
        NotImplementedError,
        "backend 'cpu' requires equal head_dim .* got 8 and 6",
    ),
    "backend-cudnn-device": (
        attend(backend="cudnn"),
        NotImplementedError,
        "backend 'cudnn' requires CUDA tensors, got cpu",
    ),
    "executor-unknown": (attend(executor="spark"), ValueError, "executor .* got 'spark'"),
    "executor-empty": (attend(executor=""), ValueError, "executor .* got ''"),
    "executor-number": (attend(executor=4), TypeError, "executor .* got 4"),
    "executor-class": (attend(executor=dict), TypeError, "executor .* got <class 'dict'>"),
    # Plans.
    "plan-negative": (plan(-1), ValueError, "seqlen_q must be at least 0, got -1"),
    "plan-negative-keys": (plan(5, -2), ValueError, "seqlen_kv must be at least 0, got -2"),
    "plan-float": (plan(1e6), TypeError, "seqlen_q must be an integer, got 1000000.0"),
    "plan-bool": (plan(True), TypeError, "seqlen_q must be an integer, got True"),
    "plan-text": (plan("70"), TypeError, "seqlen_q must be an integer, got '70'"),
    "plan-none": (plan(None), TypeError, "seqlen_(q|kv) must be an integer, got None"),
    "plan-keys-float": (plan(70, 7.5), TypeError, "seqlen_kv must be an integer, got 7.5"),
    "plan-no-workers": (plan(num_tasks=0), ValueError, "num_tasks .* got 0"),
    "plan-workers-none": (plan(num_tasks=None), TypeError, "num_tasks .* got None"),
    "plan-workers-half": (
        plan(num_tasks=Fraction(7, 2)),
        TypeError,
        r"num_tasks .* got Fraction\(7, 2\)",
    ),
    "plan-causal-text": (plan(is_causal="no"), TypeError, "is_causal must be a bool, got 'no'"),
    "plan-set-number": (lambda: Quorums(5), TypeError, "interest_set .*5"),
    "plan-set-text": (lambda: Quorums("013"), TypeError, "interest_set .* got '0'"),
    "plan-kind": (plan(kind="ring"), ValueError, "kind must be .* got 'ring'"),
    "plan-kind-type": (plan(kind=(0, 1, 3)), TypeError, r"kind must be .* got \(0, 1, 3\)"),
    "plan-grid": (plan(kind=Grid2D(2, 3)), ValueError, "number of tasks, 7, got .* 2 .* 3"),
    "plan-grid-0": (lambda: Grid2D(0, 7), ValueError, "query_groups must be at least 1, got 0"),
    "plan-hosts": (plan(kind=Hosts(Quorums(), 2)), ValueError, "size .* 7, got 2"),
    "plan-hosts-of": (lambda: Hosts("rows", 2), TypeError, "outer must be .* got 'rows'"),
    "plan-no-such-task": (
        lambda: cqs.make_plan(70, num_tasks=7).task(7),
        ValueError,
        r"index must be in range\(7\), got 7",
    ),
    # Interest sets.
    "set-empty": (check([]), ValueError, r"interest_set must contain 0, got \(\)"),
    "set-without-0": (check([1, 2, 4]), ValueError, r"must contain 0, got \(1, 2, 4\)"),
    "set-repeated": (check([0, 1, 1, 3]), ValueError, r"repeats an element: \(0, 1, 1, 3\)"),
    "set-negative": (check([0, -1, 3]), ValueError, r"in range\(7\), got -1"),
    "set-too-large": (check([0, 1, 7]), ValueError, r"in range\(7\), got 7"),
    "set-float": (check([0, 1, 3.0]), TypeError, "must hold integers, got 3.0"),
    "set-bool": (check([0, True, 3]), TypeError, "must hold integers, got True"),
    "set-text": (check(["0", "1", "3"]), TypeError, "must hold integers, got '0'"),
    "set-none": (check([0, None, 3]), TypeError, "must hold integers, got None"),
    "set-nested": (check([0, (1, 3)]), TypeError, r"must hold integers, got \(1, 3\)"),
    "set-misses": (check([0, 1, 3], 8), ValueError, "modulo 8: no two elements differ by 4"),
    "load-no-workers": (lambda: load_interest_set(0), ValueError, "num_tasks .* got 0"),
    "set-floats-numpy": (check(np.array([0.0, 1.0, 3.0])), TypeError, r"got np.float64\(0.0\)"),
    "set-bools-numpy": (check(np.array([False, True])), TypeError, "integers, got np.False_"),
    "set-2d-numpy": (check(np.array([[0, 1, 3]])), TypeError, r"got array\(\[0, 1, 3\]\)"),
    "set-0d-numpy": (check(np.array(5)), TypeError, r"collection of integers, got array\(5\)"),
    # Shapes of which costs are predicted.
    "shape-head-dim": (shape(head_dim=-5), ValueError, "head_dim must be at least 1, got -5"),
    "shape-heads": (shape(num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    "shape-batch": (shape(batch=-1), ValueError, "batch must be at least 0, got -1"),
    "shape-itemsize": (shape(itemsize=2.0), TypeError, "itemsize must be an integer, got 2.0"),
    "shape-value-dim": (shape(value_dim=True), TypeError, "value_dim .* integer, got True"),
    # Plans in JSON.
    "json-no-json": (read_text("plan"), ValueError, "Expecting value"),
    "json-cut": (read_text('{"num_tasks": 7'), ValueError, "delimiter|Expecting"),
    "json-list": (read_text("[1, 2]"), ValueError, "not a plan"),
    "json-number": (read_text("7"), ValueError, "not a plan"),
    "json-null": (read_text("null"), ValueError, "not a plan"),
    "json-empty": (read_text("{}"), ValueError, "not a plan: .*version"),
    "json-version": (read(version=1), ValueError, "version must be 2 or 3, got 1"),
    "json-workers": (read(num_tasks=8), ValueError, r"interest_set \(0, 1, 3\) .* modulo 8"),
    "json-workers-0": (read(num_tasks=0), ValueError, "num_tasks .* got 0"),
    "json-workers-text": (read(num_tasks="7"), ValueError, "num_tasks .* got '7'"),
    "json-length": (read(seqlen_q=-70), ValueError, "seqlen_q .* got -70"),
    "json-length-changed": (read(seqlen_q=71), ValueError, "not a plan: .*contradict"),
    "json-set": (read(interest_set=[0, 1]), ValueError, "no two elements differ by 2"),
    "json-tasks": (read(tasks=[]), ValueError, "not a plan: .*contradict"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_the_value(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert isinstance(raised.value, ValueError | TypeError | NotImplementedError)


@pytest.mark.parametrize(
    "find",
    [
        lambda: cqs.attention,
        lambda: cqs.flex_attention,
        lambda: cqs.distributed.attention,
        lambda: cqs.streaming.attention,
        pytest.param(lambda: cqs.Cluster.attention, marks=pytest.mark.ray),
        pytest.param(lambda: cqs.Cluster.submit, marks=pytest.mark.ray),
    ],
    ids=["attention", "flex_attention", "distributed", "streaming", "cluster", "submit"],
)
def test_arguments_of_other_libraries_are_answered(find):
    """Whatever else is missing: q, k and v are keywords elsewhere."""
    function = find()
    own = signature(function).parameters
    assert {"query", "key", "value"} <= set(own) and "kwargs" not in own
    for name in set(ADVICE) - set(own):
        with pytest.raises(TypeError, match=rf"{function.__name__}.* {name}: \w+"):
            function(**{name: None})


@pytest.mark.parametrize("name", ["memory_budget", "device", "out", "resume"])
def test_arguments_of_streaming_are_answered(name):
    with pytest.raises(TypeError, match=rf"{name}: call cqs\.streaming\.attention"):
        cqs.attention(*[tensor()] * 3, **{name: None})


def test_an_argument_of_no_library_is_an_ordinary_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'qeury'"):
        cqs.attention(qeury=tensor())


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
    for name in ("backend-cudnn-device", "set-no-cover", "scale-nan", "executor-unknown"):
        call, error, message = BAD[name]
        with pytest.raises(error, match=message):
            call()


def test_numbers_of_numpy_are_numbers():
    whole = cqs.make_plan(np.int64(70), np.uint8(90), num_tasks=np.int32(7), is_causal=np.True_)
    assert whole == cqs.make_plan(70, 90, num_tasks=7, is_causal=True)
    assert cqs.Plan.from_json(whole.to_json()) == whole
    interest_set = np.array([0, 2, 3], np.int16)
    chosen = cqs.make_plan(70, num_tasks=7, kind=Quorums(interest_set))
    assert chosen == cqs.make_plan(70, num_tasks=7, kind=Quorums([0, 2, 3]))
    assert cqs.Plan.from_json(chosen.to_json()) == chosen
    assert AttentionShape(np.int64(8), np.int64(64)) == AttentionShape(8, 64)


@pytest.mark.parametrize(
    "scale", [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2)]
)
def test_options_of_numpy_are_options(scale):
    query, key, value = torch.randn(3, 1, 2, 30, 8)
    expected = cqs.attention(query, key, value, is_causal=True, scale=0.5, num_tasks=7)
    answer = cqs.attention(
        query,
        key,
        value,
        is_causal=np.True_,
        scale=scale,
        num_tasks=np.int64(7),
        plan=Quorums(np.array([0, 1, 3])),
    )
    assert torch.equal(answer, expected)
