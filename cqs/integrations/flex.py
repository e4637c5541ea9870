"""FlexAttention's interface: block masks become patterns."""

from typing import TYPE_CHECKING

from torch import Tensor

from cqs.api import AnyExecutor, attention
from cqs.arguments import with_advice
from cqs.partial import AttentionOutput
from cqs.patterns import from_block_mask
from cqs.uncompiled import uncompiled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@uncompiled
@with_advice
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    num_tasks: int | None = None,
    backend: str | None = None,
    executor: AnyExecutor = None,
) -> Tensor | AttentionOutput:
    """Compute ``torch.nn.attention.flex_attention.flex_attention`` as independent tasks.

    A block mask is converted to a pattern (:func:`cqs.patterns.from_block_mask`), and
    :func:`cqs.attention` computes its live pairs. To convert a mask once for many calls, use
    ``cqs.attention(..., pattern=from_block_mask(block_mask))``.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``; float64, float32, bfloat16 or float16,
            on the CPU or a GPU.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``, in the dtype and on the device of
            ``query``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``, in the dtype and on the device of
            ``query``.
        score_mod: Must be ``None``: PyTorch's FlexAttention computes score functions.
        block_mask: A mask made by ``create_block_mask`` for these lengths.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        enable_gqa: Ignored: ``num_heads`` may always be a multiple of ``num_kv_heads``.
        return_lse: Whether to return the log-sum-exp as well.
        num_tasks: Number of tasks; ``None`` means one (local) or one per worker (Ray).
        backend: Backend name, as in :func:`cqs.attention`.
        executor: Executor, as in :func:`cqs.attention`.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of ``query``. With
        ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32 (float64 for float64
        inputs).

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes or devices do not fit together, or ``block_mask`` is for other
            lengths, batch or heads.
        NotImplementedError: ``score_mod`` is not ``None``, or no backend supports the call.

    Example:
        >>> import torch
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
        >>> output = flex_attention(q, k, v, block_mask=mask, num_tasks=7)
        >>> torch.allclose(output, attention(q, k, v, is_causal=True), atol=1e-5)
        True
    """
    if score_mod is not None:
        raise NotImplementedError(
            f"score_mod must be None, got {score_mod!r}: call flex_attention of PyTorch"
        )
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
