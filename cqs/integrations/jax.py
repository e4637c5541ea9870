"""JAX: attention by cqs on JAX's arrays, with gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import cqs.api
from cqs.patterns import Pattern, acsr, from_mask, per_head, sliding_window
from cqs.problem import check_problem

if TYPE_CHECKING:
    from cqs.executors.ray import Cluster


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
    executor: "str | Cluster | None" = None,
) -> jax.Array:
    """Compute what ``jax.nn.dot_product_attention`` computes, by :func:`cqs.attention`.

    Arrays go to PyTorch and back by DLPack, without a copy, on the CPU or the GPU where they are. A
    GPU is waited for before and after: JAX and PyTorch do not know what the other still reads.
    Inside ``jax.jit`` and other transformations PyTorch is called back with arrays in host memory,
    and computes on the CPU. Reverse-mode derivatives are defined, once; the backward pass computes
    the forward pass again.

    One difference: a query that sees no key gives 0, not the mean of all values.

    Args:
        query: ``[batch, seqlen_q, num_heads, head_dim]``, or without the batch; float64, float32,
            bfloat16 or float16.
        key: ``[batch, seqlen_kv, num_kv_heads, head_dim]``; ``num_heads`` must be a multiple of
            ``num_kv_heads``, and consecutive query heads share one.
        value: ``[batch, seqlen_kv, num_kv_heads, value_dim]``.
        bias: Must be ``None``: scores cannot be biased.
        mask: Boolean ``[batch, num_heads, seqlen_q, seqlen_kv]``, True where a query sees a key; 1
            stands for all, as do dimensions that are left out in front.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        is_causal: Query i sees the keys up to key i: aligned at the top left, as in JAX.
        query_seq_lengths: int32 ``[batch]``: later queries give 0.
        key_value_seq_lengths: int32 ``[batch]``: later keys are not seen.
        local_window_size: Query i sees the keys from ``i - left`` to ``i + right``; a number is
            both.
        pattern: Further limits, of :mod:`cqs.patterns`.
        num_tasks: As for :func:`cqs.attention`.
        backend: Likewise.
        executor: Likewise.

    Returns:
        ``[batch, seqlen_q, num_heads, value_dim]`` in the dtype of ``query``; without the batch if
        ``query`` has none.

    Raises:
        NotImplementedError: for a bias, and as for :func:`cqs.attention`.
        TypeError: as for :func:`cqs.attention`.
        ValueError: likewise.

    Example:
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 50, 4, 16))
        >>> output = attention(query, key, value, is_causal=True, num_tasks=7)
        >>> expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        >>> bool(jnp.allclose(output, expected, atol=1e-5))
        True
    """
    if bias is not None:
        raise NotImplementedError("a bias on the scores is not supported; a mask or a pattern is")
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    if isinstance(scale, np.generic | jax.Array):
        scale = scale.item()
    call = _Call(
        bool(is_causal),
        local_window_size,
        pattern,
        scale,
        num_tasks,
        backend,
        executor,
    )
    query, key, value = map(jnp.asarray, (query, key, value))
    has_batch = query.ndim > 3
    if not has_batch:
        query, key, value = (array[None] for array in (query, key, value))
    check_problem(*map(_as_tensor, (query, key, value)), scale=scale)
    if mask is not None:
        mask = jnp.asarray(mask)
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    limits = mask, query_seq_lengths, key_value_seq_lengths
    output = _attend(call, query, key, value, limits)
    return output if has_batch else output[0]


@dataclass(frozen=True)
class _Call:
    """What does not depend on arrays."""

    is_causal: bool
    window: tuple[int, int] | None
    pattern: Pattern | None
    scale: float | None
    num_tasks: int | None
    backend: str | None
    executor: "str | Cluster | None"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *limits: Any) -> Tensor:
        """Compute attention.

        Args:
            query: ``[batch, seqlen_q, num_heads, head_dim]``.
            key: ``[batch, seqlen_kv, num_kv_heads, head_dim]``.
            value: ``[batch, seqlen_kv, num_kv_heads, value_dim]``.
            limits: The mask and the lengths of queries and keys, each an array or ``None``.

        Returns:
            ``[batch, seqlen_q, num_heads, value_dim]``.
        """
        pattern = self._pattern(query.shape[1], key.shape[1], *limits)
        by_head = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output: Any = cqs.api.attention(
            *by_head,
            pattern=pattern,
            scale=self.scale,
            num_tasks=self.num_tasks,
            backend=self.backend,
            executor=self.executor,
        )
        contiguous: Tensor = output.transpose(1, 2).contiguous()
        return contiguous

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *limits: Any
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of query, key and value; arguments as for the forward pass."""
        tensors = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output = self.forward(*tensors, *limits)
        gradients = torch.autograd.grad(output, tensors, grad_output)
        return tuple(gradient.contiguous() for gradient in gradients)

    def _pattern(
        self, seqlen_q: int, seqlen_kv: int, mask: Any, q_lengths: Any, kv_lengths: Any
    ) -> Pattern:
        pattern = sliding_window(None, None) if self.pattern is None else self.pattern
        if self.is_causal:
            pattern = pattern & _band(None, 0, seqlen_q, seqlen_kv)
        if self.window is not None:
            pattern = pattern & _band(*self.window, seqlen_q, seqlen_kv)
        if q_lengths is not None or kv_lengths is not None:
            pattern = pattern & _of_lengths(q_lengths, kv_lengths, seqlen_q, seqlen_kv)
        if mask is not None:
            mask = np.asarray(mask)
            shape = (*mask.shape[:2], seqlen_q, seqlen_kv)
            pattern = pattern & from_mask(np.broadcast_to(mask, shape))
        return pattern


def _as_tensor(array: jax.Array) -> Tensor:
    """Return a tensor like an array by head, of no memory: an array may have no values yet."""
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
    call: _Call, query: jax.Array, key: jax.Array, value: jax.Array, limits: Any
) -> jax.Array:
    shape = (*query.shape[:3], value.shape[3])
    result = jax.ShapeDtypeStruct(shape, query.dtype)
    output: jax.Array = _by_torch(call.forward, result, (query, key, value), limits)
    return output


def _attend_forward(
    call: _Call, query: jax.Array, key: jax.Array, value: jax.Array, limits: Any
) -> tuple[jax.Array, Any]:
    return _attend(call, query, key, value, limits), (query, key, value, limits)


def _attend_backward(call: _Call, kept: Any, grad_output: jax.Array) -> tuple[Any, ...]:
    *operands, limits = kept
    results = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in operands)
    return *_by_torch(call.backward, results, (*operands, grad_output), limits), None


_attend.defvjp(_attend_forward, _attend_backward)


def _by_torch(
    function: Callable[..., Any], results: Any, operands: Sequence[jax.Array], limits: Any
) -> Any:
    """Call a function of tensors: at once, or when the arrays are known.

    Args:
        function: Called with the operands as tensors and the limits as they are.
        results: Shapes and dtypes of what it returns.
        operands: Arrays.
        limits: Arrays or ``None``.
    """

    def call(give: Callable[[Tensor], Any], operands: Any, limits: Any) -> Any:
        tensors = [*map(torch.from_dlpack, operands)]
        _finish(tensors[0].device)
        found = function(*tensors, *limits)
        _finish(tensors[0].device)
        return jax.tree.map(give, found)

    if any(isinstance(array, jax.core.Tracer) for array in (*operands, *limits)):
        later = partial(call, _to_numpy)
        return jax.pure_callback(later, results, operands, limits, vmap_method="sequential")
    return call(jax.dlpack.from_dlpack, operands, limits)


def _finish(device: torch.device) -> None:
    """Wait for a GPU.

    DLPack has streams wait for arrays to be computed, but not for them to be read: JAX frees memory
    once its kernels are launched, for itself and for PyTorch to write to.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _to_numpy(tensor: Tensor) -> Any:
    """Return an array that shares memory; numpy itself knows no bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()
