"""Attention for JAX arrays, with gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from cqs import api
from cqs.api import AnyExecutor
from cqs.patterns import Pattern, acsr, from_mask, per_head, sliding_window
from cqs.problem import check_problem

_Forward = Callable[..., Tensor]


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    pattern: Pattern | None = None,
    num_tasks: int | None = None,
    backend: str | None = None,
    executor: AnyExecutor = None,
) -> jax.Array:
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
        bias: Must be ``None``; a bias on the scores is not supported.
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
        pattern: Pattern of :mod:`cqs.patterns`, intersected with the other masks.
        num_tasks: Number of tasks, see :func:`cqs.attention`.
        backend: Name of a backend; ``None`` selects one, see :func:`cqs.attention`.
        executor: ``None``, ``"local"``, ``"ray"`` or a cluster, see :func:`cqs.attention`.

    Returns:
        ``[batch, seqlen_q, num_heads, value_dim]`` in the dtype of ``query``; without the batch
        dimension if ``query`` has none.

    Raises:
        NotImplementedError: ``bias`` is not ``None``, or no backend supports the call.
        TypeError: An argument has the wrong type or dtype.
        ValueError: Shapes, dtypes or options do not fit together.

    Example:
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 50, 4, 16))
        >>> output = attention(query, key, value, is_causal=True, num_tasks=7)
        >>> expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        >>> bool(jnp.allclose(output, expected, atol=1e-5))
        True
    """
    if bias is not None:
        raise NotImplementedError(
            f"bias must be None, got {type(bias).__name__}: pass a mask or a pattern"
        )
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    if isinstance(scale, np.generic | jax.Array):
        scale = scale.item()
    query, key, value = map(jnp.asarray, (query, key, value))
    has_batch = query.ndim > 3
    if not has_batch:
        query, key, value = (array[None] for array in (query, key, value))
    check_problem(*map(_as_tensor, (query, key, value)), scale=scale)
    if mask is not None:
        mask = jnp.asarray(mask)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    lengths = query.shape[1], key.shape[1]
    pattern = sliding_window(None, None) if pattern is None else pattern
    if is_causal:
        pattern = pattern & _band(None, 0, *lengths)
    if local_window_size is not None:
        pattern = pattern & _band(*local_window_size, *lengths)
    compute = partial(
        api.attention, scale=scale, num_tasks=num_tasks, backend=backend, executor=executor
    )
    limits = mask, query_seq_lengths, key_value_seq_lengths
    output = _attend(partial(_forward, compute, pattern), query, key, value, limits)
    return output if has_batch else output[0]


def _forward(
    compute: Callable[..., Any], pattern: Pattern, tensors: Sequence[Tensor], limits: Any
) -> Tensor:
    """Compute attention.

    Args:
        compute: :func:`cqs.attention` with the options that do not affect the mask.
        pattern: The pattern without the limits.
        tensors: Query, key and value, each ``[batch, rows, heads, columns]``.
        limits: The mask and the lengths of queries and keys, each an array or ``None``.

    Returns:
        ``[batch, seqlen_q, num_heads, value_dim]``.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in tensors)
    lengths = query.shape[2], key.shape[2]
    mask, q_lengths, kv_lengths = limits
    if q_lengths is not None or kv_lengths is not None:
        pattern = pattern & _of_lengths(q_lengths, kv_lengths, *lengths)
    if mask is not None:
        mask = np.asarray(mask)
        pattern = pattern & from_mask(np.broadcast_to(mask, (*mask.shape[:2], *lengths)))
    output: Tensor = compute(query, key, value, pattern=pattern)
    return output.transpose(1, 2).contiguous()


def _backward(forward: _Forward, tensors: Sequence[Tensor], limits: Any) -> tuple[Tensor, ...]:
    """Compute the gradients of query, key and value; the gradient of the output follows them."""
    operands = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    gradients = torch.autograd.grad(forward(operands, limits), operands, tensors[3])
    return tuple(gradient.contiguous() for gradient in gradients)


def _as_tensor(array: jax.Array) -> Tensor:
    """Return a tensor without memory in the array's shape, because a traced array has no values."""
    like = torch.empty((), dtype=getattr(torch, array.dtype.name, torch.int8)).expand(array.shape)
    return like.transpose(1, 2) if like.ndim == 4 else like


def _band(left: int | None, right: int, seqlen_q: int, seqlen_kv: int) -> Pattern:
    """Return the pattern in which query i sees the keys from ``i - left`` to ``i + right``."""
    if seqlen_q == seqlen_kv:
        return sliding_window(left, right)
    query = np.arange(seqlen_q)
    start = np.zeros_like(query) if left is None else np.clip(query - left, 0, seqlen_kv)
    stop = np.clip(query + right + 1, start, np.maximum(start, seqlen_kv))
    return acsr(start, np.ones_like(query), stop - start)


def _of_lengths(q_lengths: Any, kv_lengths: Any, seqlen_q: int, seqlen_kv: int) -> Pattern:
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
def _attend(
    forward: _Forward, query: jax.Array, key: jax.Array, value: jax.Array, limits: Any
) -> jax.Array:
    shape = (*query.shape[:3], value.shape[3])
    result = jax.ShapeDtypeStruct(shape, query.dtype)
    output: jax.Array = _by_torch(forward, result, (query, key, value), limits)
    return output


def _attend_forward(
    forward: _Forward, query: jax.Array, key: jax.Array, value: jax.Array, limits: Any
) -> tuple[jax.Array, Any]:
    return _attend(forward, query, key, value, limits), (query, key, value, limits)


def _attend_backward(forward: _Forward, kept: Any, grad_output: jax.Array) -> tuple[Any, ...]:
    *operands, limits = kept
    results = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands)
    return *_by_torch(partial(_backward, forward), results, (*operands, grad_output), limits), None


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
        found = function(tensors, limits)
        _finish(tensors[0].device)
        return jax.tree.map(give, found)

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
