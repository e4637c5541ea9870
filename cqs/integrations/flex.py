"""FlexAttention's interface: block masks become patterns, PyTorch computes score functions."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from cqs.api import attention
from cqs.arguments import with_advice
from cqs.partial import AttentionOutput
from cqs.patterns import from_block_mask
from cqs.problem import check_problem
from cqs.uncompiled import uncompiled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from cqs.executors.ray import Cluster


@uncompiled
@with_advice
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    num_tasks: int | None = None,
    backend: str | None = None,
    executor: "str | Cluster | None" = None,
) -> Tensor | AttentionOutput:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` as independent tasks.

    A block mask is converted to a pattern (:func:`cqs.patterns.from_block_mask`), and
    :func:`cqs.attention` computes its live pairs. To convert a mask once for many calls, use
    ``cqs.attention(..., pattern=from_block_mask(block_mask))``.

    A call with a ``score_mod`` is not split into tasks: PyTorch's FlexAttention computes it in this
    process, compiled on a GPU. Tensors that the function captures receive gradients.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``; float64, float32, bfloat16 or float16,
            on the CPU or a GPU.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``, in the dtype and on the device of
            ``query``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``, in the dtype and on the device of
            ``query``.
        score_mod: A function ``score_mod(score, batch, head, query_index, key_index)`` that returns
            the modified score.
        block_mask: A mask made by ``create_block_mask`` for these lengths.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        enable_gqa: Whether ``num_heads`` may be a multiple of ``num_kv_heads``; always allowed
            without a ``score_mod``.
        return_lse: Whether to return the log-sum-exp as well.
        num_tasks: Number of tasks; ``None`` means one (local) or one per worker (Ray). Must be
            ``None`` with a ``score_mod``.
        backend: Backend name, as in :func:`cqs.attention`. Must be ``None`` with a ``score_mod``.
        executor: Executor, as in :func:`cqs.attention`. Must be ``None`` with a ``score_mod``.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of ``query``. With
        ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32 (float64 for float64
        inputs), differentiable only with a ``score_mod``.

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes or devices do not fit together, or ``block_mask`` is for other
            lengths, batch or heads.
        NotImplementedError: A ``score_mod`` is combined with ``num_tasks``, ``backend`` or
            ``executor``, or no backend supports the call.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
        >>> output = flex_attention(q, k, v, block_mask=mask, num_tasks=7)
        >>> torch.allclose(output, attention(q, k, v, is_causal=True), atol=1e-5)
        True
    """
    problem = check_problem(query, key, value, scale=scale)
    if score_mod is None:
        return attention(
            query,
            key,
            value,
            pattern=None if block_mask is None else from_block_mask(block_mask),
            scale=scale,
            num_tasks=num_tasks,
            backend=backend,
            executor=executor,
            return_lse=return_lse,
        )
    if not num_tasks is backend is executor is None:
        raise NotImplementedError(
            "num_tasks, backend and executor must be None with a score_mod, which PyTorch's "
            f"FlexAttention computes, got {num_tasks!r}, {backend!r} and {executor!r}"
        )
    if block_mask is not None:
        if not isinstance(block_mask, torch_flex.BlockMask):
            raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}")
        batch, num_heads, *_ = problem.query.shape
        if block_mask.shape[0] not in (1, batch) or block_mask.shape[1] not in (1, num_heads):
            raise ValueError(
                f"block_mask must be for a batch of 1 or {batch} and for 1 or {num_heads} heads, "
                f"got shape {block_mask.shape}"
            )
    attend = _compiled() if query.is_cuda else _attend_eagerly
    output, others = attend(
        problem.query,
        problem.key,
        problem.value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=problem.scale,
        enable_gqa=enable_gqa,
        return_aux=torch_flex.AuxRequest(lse=True),
    )
    return AttentionOutput(output, others.lse) if return_lse else output


@cache
def _compiled() -> Callable[..., Any]:
    # A wrapper, so that its variants do not count towards the recompile limit of flex_attention.
    def flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return torch_flex.flex_attention(query, key, value, **options)

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


def _attend_eagerly(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Compute without compilation on a CPU, where each rectangle's shape would be retraced."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return torch_flex.flex_attention(query, key, value, **options)
