"""FlexAttention's interface: block masks become patterns, score functions run per rectangle."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from cqs.api import attention
from cqs.arguments import with_advice
from cqs.partial import AttentionOutput, Partial, lse_dtype
from cqs.patterns import from_block_mask
from cqs.patterns.masks import read_layouts
from cqs.problem import Problem, check_problem
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

    With a ``score_mod``, PyTorch's FlexAttention computes every rectangle of a task, compiled on a
    GPU, and the partial outputs are merged. The function receives positions in the whole sequence;
    tensors that it captures receive gradients. If partial outputs are merged, half-precision inputs
    are converted to float32, which is slower on a GPU.

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
        enable_gqa: Whether ``num_heads`` may be a multiple of ``num_kv_heads``.
        return_lse: Whether to return the log-sum-exp as well.
        num_tasks: Number of tasks; ``None`` means one (local) or one per worker (Ray).
        backend: Backend name, as in :func:`cqs.attention`. Not with a ``score_mod``.
        executor: Executor, as in :func:`cqs.attention`. With a ``score_mod`` only this process
            computes.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of ``query``. With
        ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32 (float64 for float64
        inputs), differentiable only with a ``score_mod``.

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes or devices do not fit together; ``block_mask`` is for other
            lengths, batch or heads; or ``num_heads`` and ``num_kv_heads`` differ without
            ``enable_gqa``.
        NotImplementedError: A ``score_mod`` is combined with a backend or an executor, or no
            backend supports the call.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 100, 100, device="cpu")
        >>> output = flex_attention(q, k, v, block_mask=mask, num_tasks=7)
        >>> torch.allclose(output, attention(q, k, v, is_causal=True), atol=1e-5)
        True
    """
    problem = check_problem(query, key, value, scale=scale)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa must be True for {query.shape[1]} query heads and {key.shape[1]} KV "
            "heads, got False"
        )
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
    if backend is not None or executor not in (None, "local"):
        raise NotImplementedError(
            f"backend and executor must be None with a score_mod, got {backend!r} and "
            f"{executor!r}: FlexAttention computes it in this process"
        )
    layouts = [] if block_mask is None else _read_layouts(block_mask, problem)
    plan = problem.make_plan(1 if num_tasks is None else num_tasks)
    rectangles = [
        (step.queries, keys) for task in plan.tasks for step in task.steps for keys in step.keys
    ]
    operands: Sequence[Tensor] = problem.query, problem.key, problem.value
    if sum(len(queries) for queries, _ in rectangles) > query.shape[2]:
        # Queries have several partial outputs, which FlexAttention returns in the dtype of its
        # inputs: half precision would round them, and their gradients, before they are merged.
        operands = [each.to(lse_dtype(each.dtype)) for each in operands]
    options = {
        "scale": problem.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "return_aux": torch_flex.AuxRequest(lse=True),
        # TF32, where the program allows it, rounds probabilities more than half precision does.
        "kernel_options": {"FLOAT32_PRECISION": "'ieee'"} if query.dtype.itemsize == 2 else {},
    }
    parts = []
    for queries, keys in rectangles:
        mask = None if block_mask is None else _cut(block_mask, layouts, queries, keys)
        if mask is not None or block_mask is None:
            found = _attend(operands, queries, keys, score_mod, block_mask=mask, **options)
            parts.append((queries, found))
    return _merge(problem, parts).to_result(return_lse)


def _read_layouts(mask: "BlockMask", problem: Problem) -> list[Tensor]:
    """Return the full and partial blocks of a block mask that fits the problem, or raise."""
    if not isinstance(mask, torch_flex.BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(mask).__name__}")
    lengths = problem.query.shape[2], problem.key.shape[2]
    if tuple(mask.seq_lengths) != lengths:
        raise ValueError(f"block_mask must be for lengths {lengths}, got {mask.seq_lengths}")
    for name, number, of_mask in zip(
        ("batch", "number of heads"), problem.query.shape[:2], mask.shape[:2], strict=True
    ):
        if of_mask not in (1, number):
            raise ValueError(f"block_mask must be for a {name} of {number} or 1, got {of_mask}")
    return [torch.from_numpy(each).to(mask.kv_indices.device) for each in read_layouts(mask)]


def _cut(
    mask: "BlockMask", layouts: Sequence[Tensor], queries: range, keys: range
) -> "BlockMask | None":
    """Return the block mask of a rectangle, ``None`` if all of it is masked out.

    Args:
        mask: The block mask of the whole sequence.
        layouts: Its blocks without masked pairs, and its blocks in which the mask function decides,
            bool ``[batch or 1, heads or 1, block rows, block columns]``.
        queries: Positions of the queries.
        keys: Positions of the keys.
    """
    sizes, inner = mask.BLOCK_SIZE, mask.mask_mod
    rows, columns = (
        slice(tokens.start // size, -(-tokens.stop // size))
        for tokens, size in zip((queries, keys), sizes, strict=True)
    )
    full, partial = layouts
    if not (full | partial)[..., rows, columns].any():
        return None
    batch, heads = full.shape[:2]
    first_query, first_key = _first(queries, full), _first(keys, full)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q, k = q + first_query, k + first_key
        block = b % batch, h % heads, q // sizes[0], k // sizes[1]
        return full[block] | (partial[block] & inner(b, h, q, k))

    shape = batch, heads, len(queries), len(keys)
    return torch_flex.create_block_mask(mask_mod, *shape, device=full.device, BLOCK_SIZE=sizes)


def _attend(
    operands: Sequence[Tensor],
    queries: range,
    keys: range,
    inner: Callable[..., Tensor],
    **options: Any,
) -> Partial:
    """Compute the partial output of a rectangle.

    Args:
        operands: Query, key and value of the whole sequence.
        queries: Positions of the queries.
        keys: Positions of the keys.
        inner: The score function, in positions of the whole sequence.
        **options: Further arguments of PyTorch's FlexAttention.
    """
    first_query, first_key = (_first(tokens, operands[0]) for tokens in (queries, keys))

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return inner(score, b, h, q + first_query, k + first_key)

    attend = _compiled() if operands[0].is_cuda else _attend_eagerly
    # A copy, because torch.compile specialises code on a slice's storage offset.
    tensors = (
        tensor[:, :, tokens.start : tokens.stop].clone()
        for tensor, tokens in zip(operands, (queries, keys, keys), strict=True)
    )
    output, others = attend(*tensors, score_mod=score_mod, **options)
    return Partial(output, others.lse)


def _first(tokens: range, like: Tensor) -> Tensor:
    """Return the first position as a tensor: torch.compile would specialise on an integer."""
    return torch.tensor(tokens.start, device=like.device)


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


def _merge(problem: Problem, parts: Sequence[tuple[range, Partial]]) -> Partial:
    """Merge partial outputs in their order, with operations that autograd differentiates.

    Args:
        problem: The checked problem.
        parts: Partial outputs over disjoint keys, each with its query rows.
    """
    edges = {0, problem.query.shape[2]}
    edges |= {edge for queries, _ in parts for edge in (queries.start, queries.stop)}
    merged = [_merge_rows(problem, parts, *rows) for rows in pairwise(sorted(edges))]
    if not merged:
        return problem.empty_answer()
    return Partial(*(torch.cat(tensors, dim=2) for tensors in zip(*merged, strict=True)))


def _merge_rows(
    problem: Problem, parts: Sequence[tuple[range, Partial]], start: int, stop: int
) -> Partial:
    """Merge the query rows from ``start`` to ``stop``; each partial output has all or none of them.

    The formulas are those of :class:`cqs.partial.RunningMerge`: ``output = sum(exp(lse_i - M) *
    output_i) / S`` with ``M = max(lse_i)`` and ``S = sum(exp(lse_i - M))``.
    """
    shape = (*problem.query.shape[:2], stop - start)
    found = [
        [part[:, :, start - queries.start : stop - queries.start] for part in partial]
        for queries, partial in parts
        if queries.start <= start < queries.stop
    ]
    if not found:
        lse = problem.query.new_full(shape, -torch.inf, dtype=lse_dtype(problem.query.dtype))
        return Partial(problem.value.new_zeros((*shape, problem.value.shape[3])), lse)
    outputs, lses = (torch.stack(tensors) for tensors in zip(*found, strict=True))
    largest = lses.detach().amax(dim=0)
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = torch.exp(lses - largest)
    total = weights.sum(dim=0)
    is_blind = total == 0
    total = total.masked_fill(is_blind, 1)
    output = ((weights / total).unsqueeze(-1) * outputs).sum(dim=0)
    lse = (largest + total.log()).masked_fill(is_blind, -torch.inf)
    return Partial(output.to(problem.query.dtype), lse)
