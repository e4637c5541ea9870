"""``cqs.attention``: exact attention on one device."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cqs.arguments import as_bool, with_advice
from cqs.executors import local_operator
from cqs.executors.contract import attend
from cqs.executors.known_calls import find_known
from cqs.executors.local import LocalExecutor
from cqs.executors.observe import is_observed
from cqs.executors.one_call import make_call
from cqs.executors.operators import handle_of, plan_text, seed_of
from cqs.partial import AttentionOutput
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem
from cqs.problem.masks import add_mask
from cqs.problem.scores import Scores, take_apart
from cqs.problem.tensors import autocast
from cqs.scheduler import Kind
from cqs.uncompiled import replaced_in_graphs
from cqs.worker.backends import check_backend_name

_EXECUTOR = LocalExecutor()


def _attention_in_graph(
    query: Tensor, key: Tensor, value: Tensor, *positional: Any, **options: Any
) -> Any:
    """Call an operator in place of :func:`attention`."""
    options.update(zip(("attn_mask", "dropout_p", "is_causal"), positional, strict=False))
    if not options.get("enable_gqa", True) and key.shape[1] not in (1, query.shape[1]):
        return NotImplemented  # an error
    query, key, value = autocast(query, key, value)
    pattern, scores = options.get("pattern"), options.get("scores")
    dropout_p, verify = options.get("dropout_p", 0.0), options.get("verify", False)
    if (attn_mask := options.get("attn_mask")) is not None:
        if query.ndim != 4 or key.ndim != 4:
            return NotImplemented  # an error
        batch = max(query.shape[0], key.shape[0], value.shape[0])
        sizes = batch, *query.shape[1:3], key.shape[2]
        pattern, scores = add_mask(attn_mask, sizes, query.device, pattern, scores)
    is_dense = pattern is None and not (dropout_p or verify)
    operator = local_operator.dense_attention if is_dense else local_operator.attention
    tensors, softcap, bias_requires_grad, is_eager = take_apart(scores)
    if is_eager or options.get("reproducible", False):
        return NotImplemented
    handles = *tensors, handle_of(pattern), seed_of(dropout_p, options.get("seed"))
    is_causal, scale = options.get("is_causal", False), options.get("scale")
    values = is_causal, scale, softcap, bias_requires_grad, dropout_p
    choices = options.get("num_tasks"), plan_text(options.get("plan")), options.get("backend")
    output, lse = operator(query, key, value, *handles, *values, *choices, verify)
    return AttentionOutput(output, lse) if options.get("return_lse", False) else output


@with_advice
@replaced_in_graphs(_attention_in_graph, torch._C._len_torch_dispatch_stack)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = True,
    pattern: Pattern | None = None,
    seed: int | None = None,
    scores: Scores | None = None,
    num_tasks: int | None = None,
    plan: Kind | str | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    verify: bool = False,
    reproducible: bool = False,
) -> Tensor | AttentionOutput:
    """Compute exact attention as ``num_tasks`` independent tasks.

    The signature begins with that of ``torch.nn.functional.scaled_dot_product_attention``, and
    results are equal up to rounding, with these differences:

    - Causal attention of unequal lengths is aligned at the bottom right: the last query attends to
      all keys. The ``is_causal`` of that function is aligned at the top left.
    - A query that attends to no key has output 0 and LSE -inf.
    - ``attn_mask`` and ``is_causal`` may be combined.
    - ``enable_gqa`` is True unless it is given.

    Under ``torch.autocast`` query, key and value are cast as those of that function.
    Sums are accumulated in float32 (float64 for float64 inputs). Inputs are never written to.
    Autograd computes first derivatives of the output; it treats the LSE as a constant.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``; float64, float32, bfloat16 or float16,
            on the CPU or a GPU, with any strides. Query, key or value with a batch of 1 is
            broadcast.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``, in the dtype and on the device of
            ``query``. ``num_heads`` must be a multiple of ``num_kv_heads``; consecutive query heads
            share a KV head (GQA).
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``, in the dtype and on the device of
            ``query``.
        attn_mask: Boolean, True where a query attends to a key: equivalent to
            ``pattern=from_mask(attn_mask)``, and intersected with ``pattern`` and the causal mask.
            Or a floating-point bias: equivalent to ``scores=Scores(bias=attn_mask)``, with its
            gradient. Broadcastable to ``[batch, num_heads, seqlen_q, seqlen_kv]``, on the device of
            ``query``. Convert a boolean mask once, with :func:`cqs.patterns.from_mask`, if many
            calls use it.
        dropout_p: Probability, in [0, 1), that an attention weight is zeroed after the softmax; the
            others are divided by ``1 - dropout_p``. The dropout mask is a function of seed, batch,
            head and positions, independent of tasks, executor and kernels.
        is_causal: Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        enable_gqa: Whether ``key`` and ``value`` may have fewer heads than ``query``, but more than
            one.
        pattern: Sparse pattern of :mod:`cqs.patterns`, the query-key pairs that attend. With
            ``is_causal`` it is intersected with the causal mask. Masked blocks are not computed.
        seed: Random seed of the dropout mask, in [0, 2^63). ``None`` draws one from PyTorch's CPU
            generator for each call.
        scores: Sinks, soft cap, ALiBi, bias or a score function; see :class:`cqs.Scores`.
        num_tasks: Number of tasks; ``None`` means one, or 24 with ``reproducible``.
        plan: Kind of the plan, see ``kind`` of :func:`cqs.make_plan`; ``None`` means quorums.
        backend: ``"cpu"``, ``"triton"``, ``"flash"``, ``"cudnn"``, ``"flex"`` or ``"reference"``;
            ``None`` selects the first of :data:`cqs.worker.backends.BACKENDS` that supports the
            call. A named backend never falls back to another; it raises.
        return_lse: Whether to return the log-sum-exp as well.
        verify: Whether to recompute sampled rows in float64 and raise an error if they deviate.
        reproducible: Whether the bits of the results depend on the problem and ``num_tasks`` alone,
            and are those of every other executor; see docs/exactness.md.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype and on the device of
        ``query``. With ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32
        (float64 for float64 inputs).

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes, devices or options do not fit together.
        NotImplementedError: No backend, or not the named one, supports the call. The message gives
            the reason.
        torch.OutOfMemoryError: The GPU has too little memory; the message proposes a remedy.
        cqs.VerificationError: ``verify`` found a row with an error larger than rounding explains.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> output = attention(q, k, v, is_causal=True, num_tasks=7)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(output, dense, atol=1e-5)
        True
    """
    if backend is not None:
        check_backend_name(backend)
    return_lse, verify = as_bool("return_lse", return_lse), as_bool("verify", verify)
    has_defaults = attn_mask is seed is scores is num_tasks is plan is None
    is_plain = has_defaults and reproducible is False and not (dropout_p or verify)
    if is_plain and type(dropout_p) is float:
        options = is_causal, scale, pattern, enable_gqa, backend
        compute = find_known(make_call, query, key, value, *options)
        with suppress(torch.OutOfMemoryError):  # raised below, with a remedy
            if compute is not None and not is_observed():
                return compute(query, key, value).to_result(return_lse)
    problem = check_problem(
        *autocast(query, key, value),
        attn_mask=attn_mask,
        enable_gqa=enable_gqa,
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        scores=scores,
        num_tasks=num_tasks,
        reproducible=reproducible,
    )
    number = 1 if problem.num_tasks is None else problem.num_tasks
    make_plan = partial(Problem.make_plan, num_tasks=number, kind=plan)
    answer = attend(_EXECUTOR, problem, make_plan, backend=backend, verify=verify)
    return answer.to_result(return_lse)
