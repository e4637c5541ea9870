"""Attention for JAX arrays, with gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from cqs import api
from cqs.partial import lse_dtype
from cqs.patterns import Pattern, acsr, from_mask, per_head, sliding_window
from cqs.problem import check_problem
from cqs.problem.scores import Scores

if TYPE_CHECKING:
    from cqs.executors.ray import Cluster

_Forward = Callable[..., tuple[Tensor, Tensor]]


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    pattern: Pattern | None = None,
    num_tasks: int | None = None,
    backend: str | None = None,
    cluster: "Cluster | None" = None,
) -> Any:
    """Compute attention with the signature of ``jax.nn.dot_product_attention``.

    PyTorch receives the arrays through DLPack without a copy, on their CPU or GPU. The GPU is
    synchronised before and after the computation, because JAX and PyTorch do not track each other's
    reads. Inside ``jax.jit`` and other transformations PyTorch is called back with arrays in host
    memory, and computes on the CPU. First reverse-mode derivatives are defined; the backward pass
    recomputes the forward pass.

    A query that sees no key has output 0; in JAX it has the mean of all values.

    Args:
        query: ``[batch, seqlen_q, num_heads, head_dim]``, or without the batch dimension; float64,
            float32, bfloat16 or float16.
        key: ``[batch, seqlen_kv, num_kv_heads, head_dim]``; ``num_heads`` must be a multiple of
            ``num_kv_heads``, and consecutive query heads share a KV head.
        value: ``[batch, seqlen_kv, num_kv_heads, value_dim]``.
        bias: Added to the scores: float64, float32, bfloat16 or float16, broadcastable to ``[batch,
            num_heads, seqlen_q, seqlen_kv]``. Its gradient is computed as well.
        mask: Boolean ``[batch, num_heads, seqlen_q, seqlen_kv]``, True where a query sees a key. A
            dimension of 1 applies to all; leading dimensions may be omitted.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        is_causal: Query i sees keys up to i, aligned at the top left as in JAX.
        query_seq_lengths: Number of queries of each batch element, int32 ``[batch]``; later queries
            have output 0.
        key_value_seq_lengths: Number of keys of each batch element, int32 ``[batch]``; later keys
            are masked out.
        local_window_size: ``(left, right)``: query i sees the keys from ``i - left`` to
            ``i + right``. One integer sets both.
        return_residual: Whether to return the log-sum-exp as well.
        pattern: Pattern of :mod:`cqs.patterns`, intersected with the other masks.
        num_tasks: Number of tasks, see :func:`cqs.attention`.
        backend: Name of a backend; ``None`` selects one, see :func:`cqs.attention`.
        cluster: A :class:`cqs.Cluster` whose workers compute; ``None`` computes in this process.

    Returns:
        ``[batch, seqlen_q, num_heads, value_dim]`` in the dtype of ``query``; without the batch
        dimension if ``query`` has none. With ``return_residual`` also the log-sum-exp, ``[batch,
        seqlen_q, num_heads]``, float32 (float64 for float64 arrays), a constant for derivatives.

    Raises:
        NotImplementedError: No backend supports the call.
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes, dtypes or options do not fit together.

    Example:
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 50, 4, 16))
        >>> output = attention(query, key, value, is_causal=True, num_tasks=7)
        >>> expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        >>> bool(jnp.allclose(output, expected, atol=1e-5))
        True
    """
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    if isinstance(scale, np.generic | jax.Array):
        scale = scale.item()
    query, key, value = map(jnp.asarray, (query, key, value))
    has_batch = query.ndim > 3
    if not has_batch:
        query, key, value = (array[None] for array in (query, key, value))
    bias, mask = (
        None if array is None else jnp.asarray(array)[(None,) * (4 - jnp.ndim(array))]
        for array in (bias, mask)
    )
    like = None if bias is None else _as_tensor(bias).transpose(1, 2)
    check_problem(
        *map(_as_tensor, (query, key, value)),
        scale=scale,
        scores=None if like is None else Scores(bias=like),
    )
    lengths = query.shape[1], key.shape[1]
    pattern = sliding_window(None, None) if pattern is None else pattern
    if is_causal:
        pattern = pattern & _band(None, 0, *lengths)
    if local_window_size is not None:
        pattern = pattern & _band(*local_window_size, *lengths)
    attend: Callable[..., Any] = api.attention if cluster is None else cluster.attention
    compute = partial(attend, scale=scale, num_tasks=num_tasks, backend=backend)
    limits = mask, query_seq_lengths, key_value_seq_lengths
    operands = (query, key, value) if bias is None else (query, key, value, bias)
    output, lse = _attend(partial(_forward, compute, pattern), operands, limits)
    if not has_batch:
        output, lse = output[0], lse[0]
    return (output, jax.lax.stop_gradient(lse)) if return_residual else output


def _forward(
    compute: Callable[..., Any], pattern: Pattern, tensors: Sequence[Tensor], limits: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        compute: :func:`cqs.attention` with the options that do not affect the mask.
        pattern: The pattern without the limits.
        tensors: Query, key and value, each ``[batch, rows, heads, columns]``; and a bias, if any.
        limits: The mask and the lengths of queries and keys, each an array or ``None``.

    Returns:
        ``[batch, seqlen_q, num_heads, value_dim]`` and LSE, ``[batch, seqlen_q, num_heads]``.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors[:3])
    scores = Scores(bias=tensors[3]) if len(tensors) > 3 else None
    lengths = query.shape[2], key.shape[2]
    mask, q_lengths, kv_lengths = limits
    if q_lengths is not None or kv_lengths is not None:
        pattern = pattern & _pattern_of_lengths(q_lengths, kv_lengths, *lengths)
    if mask is not None:
        mask = np.asarray(mask)
        pattern = pattern & from_mask(np.broadcast_to(mask, (*mask.shape[:2], *lengths)))
    output, lse = compute(query, key, value, pattern=pattern, scores=scores, return_lse=True)
    return output.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()


def _backward(forward: _Forward, tensors: Sequence[Tensor], limits: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of the operands, which the gradient of the output follows."""
    operands = [tensor.detach().requires_grad_() for tensor in tensors[:-1]]
    gradients = torch.autograd.grad(forward(operands, limits)[0], operands, tensors[-1])
    return tuple(gradient.contiguous() for gradient in gradients)


def _as_tensor(array: jax.Array) -> Tensor:
    """Return a tensor without memory in the array's shape, because a traced array has no values."""
    like = torch.empty((), dtype=getattr(torch, array.dtype.name, torch.int8), device="cpu").expand(
        array.shape
    )
    return like.transpose(1, 2) if like.ndim == 4 else like


def _band(left: int | None, right: int, seqlen_q: int, seqlen_kv: int) -> Pattern:
    """Return the pattern in which query i sees the keys from ``i - left`` to ``i + right``."""
    if seqlen_q == seqlen_kv:
        return sliding_window(left, right)
    query = np.arange(seqlen_q)
    start = np.zeros_like(query) if left is None else np.clip(query - left, 0, seqlen_kv)
    stop = np.clip(query + right + 1, start, np.maximum(start, seqlen_kv))
    return acsr(start, np.ones_like(query), stop - start)


def _pattern_of_lengths(q_lengths: Any, kv_lengths: Any, seqlen_q: int, seqlen_kv: int) -> Pattern:
    """Return the pattern of batch elements that are shorter than the arrays."""
    query = np.arange(seqlen_q)
    batch = len(kv_lengths if q_lengths is None else q_lengths)
    queries = np.full(batch, seqlen_q) if q_lengths is None else np.asarray(q_lengths)
    keys = np.full(batch, seqlen_kv) if kv_lengths is None else np.asarray(kv_lengths)
    return per_head(
        [
            [acsr(np.zeros_like(query), np.ones_like(query), np.where(query < rows, columns, 0))]
            for rows, columns in zip(queries, np.minimum(keys, seqlen_kv), strict=True)
        ]
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(forward: _Forward, operands: Sequence[jax.Array], limits: Any) -> Any:
    query, _, value, *_ = operands
    dtype = str(lse_dtype(getattr(torch, query.dtype.name))).removeprefix("torch.")
    results = (
        jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct(query.shape[:3], dtype),
    )
    return _by_torch(forward, results, operands, limits)


def _attend_forward(
    forward: _Forward, operands: Sequence[jax.Array], limits: Any
) -> tuple[Any, Any]:
    return _attend(forward, operands, limits), (operands, limits)


def _attend_backward(forward: _Forward, kept: Any, gradients: Any) -> tuple[Any, Any]:
    operands, limits = kept
    results = tuple(jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands)
    given = *operands, gradients[0]  # the LSE is a constant
    return _by_torch(partial(_backward, forward), results, given, limits), None


_attend.defvjp(_attend_forward, _attend_backward)


def _by_torch(
    function: Callable[..., Any], results: Any, operands: Sequence[jax.Array], limits: Any
) -> Any:
    """Call a function of tensors at once, or by a callback if an array is traced.

    Args:
        function: Called with the operands as tensors and the unchanged limits.
        results: Shapes and dtypes of the function's results.
        operands: Arrays that become tensors.
        limits: The mask and the lengths of queries and keys, each an array or ``None``.
    """

    def call(give: Callable[[Tensor], Any], operands: Any, limits: Any) -> Any:
        tensors = [*map(torch.from_dlpack, operands)]
        _finish(tensors[0].device)
        outputs = function(tensors, limits)
        _finish(tensors[0].device)
        return jax.tree.map(give, outputs)

    if any(isinstance(array, jax.core.Tracer) for array in (*operands, *limits)):
        later = partial(call, _to_numpy)
        return jax.pure_callback(later, results, operands, limits, vmap_method="sequential")
    return call(jax.dlpack.from_dlpack, operands, limits)


def _finish(device: torch.device) -> None:
    """Wait until a GPU has finished.

    DLPack orders reads after the writes of an array, but not later writes after the reads: JAX
    reuses memory as soon as its kernels are launched.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_numpy(tensor: Tensor) -> Any:
    """Return an array that shares the tensor's memory; NumPy itself has no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()
