"""Conversion of arguments to Python numbers, and errors for arguments of other libraries.

NumPy scalars are accepted as numbers; bools are not.
"""

import math
import operator
import sys
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from numbers import Real
from typing import Any, ParamSpec, TypeVar, get_args

_P = ParamSpec("_P")
_T = TypeVar("_T")

_ADVICE = {
    "q": "pass query, [batch, num_heads, seqlen, head_dim]",
    "k": "pass key, [batch, num_kv_heads, seqlen, head_dim]",
    "v": "pass value, [batch, num_kv_heads, seqlen, value_dim]",
    "attn_mask attention_mask mask key_padding_mask": (
        "pass pattern=cqs.patterns.from_mask(mask), or scores=cqs.Scores(bias=mask) for "
        "floating-point values"
    ),
    "attn_bias bias": "pass scores=cqs.Scores(bias=bias)",
    "pattern scores": "pass it to cqs.attention",
    "block_mask": "pass pattern=cqs.patterns.from_block_mask(block_mask)",
    "is_causal causal": "pass is_causal to cqs.attention",
    "softmax_scale sm_scale scaling": "pass scale",
    "dropout_p dropout p": "pass dropout_p to cqs.attention",
    "window_size sliding_window local_window_size": (
        "pass pattern=cqs.patterns.sliding_window(left, right) to cqs.attention"
    ),
    "score_mod": "pass scores=cqs.Scores(score_mod=score_mod) to cqs.attention",
    "alibi_slopes": "pass scores=cqs.Scores(alibi_slopes=alibi_slopes) to cqs.attention",
    "softcap": "pass scores=cqs.Scores(softcap=softcap) to cqs.attention",
    "sinks s_aux learnable_sink": "pass scores=cqs.Scores(sinks=sinks) to cqs.attention",
    "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv": (
        "pass pattern=cqs.patterns.documents(cu_seqlens_q, cu_seqlens_k) to cqs.attention, "
        "with all documents in one batch element"
    ),
    "seqused_q seqused_k q_lengths kv_lengths query_seq_lengths key_value_seq_lengths": (
        "pass pattern=cqs.patterns.padded(q_lengths, kv_lengths) to cqs.attention"
    ),
    "max_seqlen_q max_seqlen_k": "leave it out: cumulative lengths suffice",
    "return_aux return_softmax_lse return_attn_probs need_weights": (
        "pass return_lse=True to get the log-sum-exp; weights and maxima are not kept"
    ),
    "enable_gqa": "leave it out: query heads share KV heads where these are fewer",
    "kernel_options": "leave it out: kernels choose their own tiles, and backend names a kernel",
    "deterministic": "leave it out: results are deterministic, except gradients by backend='cudnn'",
    "plan": "pass strategy=cqs.distributed.Strategy(plan=...) on ranks; a memory budget is a plan",
    "num_tasks": "leave it out: a rank computes one task, and a memory budget decides otherwise",
    "strategy": "call cqs.distributed.attention, or pass a sharded sequence to a cqs.Cluster",
    "executor": "call attention of a cqs.Cluster, which computes on Ray",
    "progress": "call cqs.streaming.attention or attention of a cqs.Cluster",
    "group process_group": "call cqs.distributed.attention(..., group=...)",
    "head_parallel num_chunks links max_bytes": (
        "pass strategy=cqs.distributed.Strategy(...) to cqs.distributed.attention"
    ),
    "joint joint_tensor_query joint_tensor_key joint_tensor_value joint_strategy": (
        "pass joint=cqs.distributed.JointTokens(...) to cqs.distributed.attention, or concatenate "
        "the joint tokens with the others"
    ),
    "device": "move the tensors to the device, or call cqs.streaming.attention",
    "memory_budget out": "call cqs.streaming.attention, which takes it",
    "resume": "call cqs.streaming.attention(..., out=Resumable(...))",
}
ADVICE = {name: advice for names, advice in _ADVICE.items() for name in names.split()}
"""The equivalent of each argument of scaled_dot_product_attention, FlexAttention, FlashAttention,
xFormers, JAX or Transformers that our functions lack."""


def as_integer(name: str, value: Any, least: int, most: int = sys.maxsize) -> int:
    """Return ``value`` as an ``int`` between ``least`` and ``most``, both inclusive.

    Args:
        name: Name of the argument, for the error message.
        value: An ``int`` or an object with ``__index__``, such as a NumPy integer.
        least: Smallest value allowed.
        most: Largest value allowed.

    Raises:
        TypeError: ``value`` is not an integer, or is a bool.
        ValueError: ``value`` is out of range.
    """
    number = to_integer(value, f"{name} must be an integer")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {as_text(number)}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {as_text(number)}")
    return number


def as_text(number: int) -> str:
    """Format an integer, or its number of bits if Python would reject it as too long."""
    return str(number) if number.bit_length() < 1024 else f"{number.bit_length()} bits"


def to_integer(value: Any, rule: str) -> int:
    """Return ``value`` as an ``int``, or raise TypeError with the text of ``rule``."""
    if type(value) is int:
        return value
    try:
        if not _is_bool(value):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{rule}, got {value!r}")


def to_float(value: Any, rule: str) -> float:
    """Return ``value`` as a ``float``, or raise TypeError with the text of ``rule``.

    Integers beyond the range of a float become infinity.
    """
    if type(value) is float:
        return value
    if _is_bool(value) or not issubclass(type(value), Real):
        raise TypeError(f"{rule}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_bool(name: str, value: Any, rule: str = "a bool") -> bool:
    """Return ``value`` as a ``bool``, or raise TypeError unless it is a scalar bool."""
    if type(value) is bool:
        return value
    if not _is_bool(value) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name} must be {rule}, got {value!r}")
    return bool(value)


def _is_bool(value: Any) -> bool:
    """Return whether ``value`` is a bool or has dtype bool, without importing NumPy or torch."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def with_advice(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function raise TypeError for an unknown keyword argument.

    The message gives the equivalent of another library's argument. Keyword arguments that are
    declared as an unpacked ``TypedDict`` are known by its fields.
    """
    names = set[str]()
    for parameter in signature(function).parameters.values():
        is_unpacked = parameter.kind == Parameter.VAR_KEYWORD and get_args(parameter.annotation)
        names |= set(is_unpacked[0].__annotations__ if is_unpacked else [parameter.name])
    known = frozenset(names)  # which torch.compile can read

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name in kwargs:
            if name not in known and name in ADVICE:
                raise TypeError(f"{function.__name__}() does not support {name}: {ADVICE[name]}")
            if name not in known:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}"
                )
        return function(*args, **kwargs)

    return call
