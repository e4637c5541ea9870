"""FlexAttention's interface: block masks become patterns, score functions score options."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cqs.api import attention
from cqs.arguments import with_advice
from cqs.partial import AttentionOutput
from cqs.patterns.masks import read_block_mask
from cqs.problem.score_terms import ScoreMod
from cqs.problem.scores import Scores
from cqs.uncompiled import uncompiled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


@uncompiled
@with_advice
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: "AuxRequest | None" = None,
    num_tasks: int | None = None,
    backend: str | None = None,
) -> "Tensor | AttentionOutput | tuple[Tensor, AuxOutput]":
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
        score_mod: Function of score, batch element, query head, query and key that returns another
            score; see :class:`cqs.Scores`. Tensors that it reads may require gradients.
        block_mask: A mask made by ``create_block_mask`` for these lengths.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        enable_gqa: Whether there may be fewer KV heads than query heads, but more than one.
        return_lse: Whether to return the log-sum-exp as well.
        kernel_options: Accepted but not used: these options tune PyTorch's kernels, and do not
            change results.
        return_aux: A request for the log-sum-exp in PyTorch's newer form. ``max_scores`` is not
            supported.
        num_tasks: Number of tasks; ``None`` means one.
        backend: Backend name, as in :func:`cqs.attention`.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of ``query``. With
        ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32 (float64 for float64
        inputs). With ``return_aux`` the second value is an ``AuxOutput`` with this ``lse``, if it
        is requested.

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes or devices do not fit together, or ``block_mask`` is for other
            lengths, batch or heads; or ``return_lse`` and ``return_aux`` are both given.
        NotImplementedError: ``return_aux`` requests ``max_scores``, or no backend supports the
            call.

    Example:
        >>> import torch
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
        >>> output = flex_attention(q, k, v, block_mask=mask, num_tasks=7)
        >>> torch.allclose(output, attention(q, k, v, is_causal=True), atol=1e-5)
        True
    """
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse must be False with return_aux, got True")
        if not hasattr(return_aux, "max_scores"):
            raise TypeError(f"return_aux must be an AuxRequest or None, got {return_aux!r}")
        if return_aux.max_scores:
            raise NotImplementedError(
                "return_aux must not request max_scores: tasks keep the log-sum-exp alone"
            )
    sizes = getattr(query, "shape", ())[:2]
    answer = attention(
        query,
        key,
        value,
        scale=scale,
        enable_gqa=enable_gqa,
        pattern=None if block_mask is None else read_block_mask(block_mask, *sizes),
        scores=None if score_mod is None else Scores(score_mod=score_mod),
        num_tasks=num_tasks,
        backend=backend,
        return_lse=return_lse or (return_aux is not None and return_aux.lse),
    )
    if return_aux is None:
        return answer
    from torch.nn.attention.flex_attention import AuxOutput

    if isinstance(answer, Tensor):
        return answer, AuxOutput()
    return answer.output, AuxOutput(lse=answer.lse)
