"""The tensors and options of one attention call: validated once, and not checked again."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, starmap
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from cqs.arguments import as_bool, as_integer, to_float
from cqs.partial import Partial, lse_dtype
from cqs.patterns import BoundPattern, Pattern
from cqs.problem.dropout import Dropout
from cqs.problem.masks import add_mask, check_is_pattern, check_pattern
from cqs.problem.options import ProblemOptions
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import check_scores
from cqs.problem.tensors import check_kind, dense_value
from cqs.scheduler import AttentionShape, Kind, Plan, make_plan

_NAMES = "query", "key", "value"
REPRODUCIBLE_TASKS = 24
"""Number of tasks of a reproducible call without ``num_tasks``; many numbers of processes divide
it."""
GPU_TILE = 128
"""Tokens of a tile of the GPU kernels; token groups on a GPU begin at multiples of it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """The tensors and options of one attention call, validated by :func:`check_problem`."""

    query: Tensor
    """``[batch, num_heads, seqlen_q, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, seqlen_kv, head_dim]``."""
    value: Tensor
    """``[batch, num_kv_heads, seqlen_kv, value_dim]``."""
    is_causal: bool
    """Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``."""
    scale: float
    """Factor on the scores."""
    dropout: Dropout | None = None
    """``None`` for a dropout probability of 0."""
    pattern: Pattern | None = None
    """``None`` for dense attention, causal or not. With a pattern :attr:`is_causal` is False."""
    sinks: Tensor | None = None
    """A score of each query head without a value, ``[num_heads]``; see :class:`cqs.Scores`."""
    terms: ScoreTerms | None = None
    """What else changes the scores; see :class:`cqs.Scores`."""
    num_tasks: int | None = None
    """Number of tasks; ``None`` lets the executor choose one."""
    is_reproducible: bool = False
    """Whether the bits of the result depend on the problem and its number of tasks alone."""

    @property
    def bound_pattern(self) -> BoundPattern | None:
        """The pattern bound to the lengths of the tensors, for a problem without per-head ones."""
        if self.pattern is None:
            return None
        return self.pattern.bind(self.query.shape[2], self.key.shape[2])

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records a call."""
        if not torch.is_grad_enabled():
            return False
        required = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        required |= self.sinks is not None and self.sinks.requires_grad
        return required or (self.terms is not None and bool(self.terms.leaves))

    @property
    def differs_by_head(self) -> bool:
        """Whether the pattern is given per head or per batch element."""
        return self.pattern is not None and self.pattern.heads != (1, 1)

    def parts(self) -> Iterator[tuple[tuple[slice, slice], "Problem"]]:
        """Divide the problem into parts that each have a single pattern.

        Adjacent batch elements of equal patterns form one part, and adjacent heads too if they are
        all the query heads of their KV heads, or belong to a single KV head.

        Yields:
            Slices of batch elements and query heads, and the problem of this part. Without a
            pattern there is one part.
        """
        for (row, heads), (_, kv_heads) in self.cuts():
            batch, head = row.start or 0, heads.start or 0
            yield (
                (row, heads),
                replace(
                    self,
                    query=self.query[row, heads],
                    key=self.key[row, kv_heads],
                    value=self.value[row, kv_heads],
                    dropout=self.dropout and self.dropout.moved(batch, head),
                    pattern=self.pattern and self.pattern.head(batch, head),
                    sinks=None if self.sinks is None else self.sinks[heads],
                    terms=self.terms and self.terms.part(row, heads),
                ),
            )

    def cuts(self) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Yield ``(batch elements, query heads), (batch elements, KV heads)`` of each part."""
        pattern, whole = self.pattern, slice(None)
        batches, num_heads = (1, 1) if pattern is None else pattern.heads
        patterns = [
            tuple(pattern and pattern.head(batch, head) for head in range(num_heads))
            for batch in range(batches)
        ]
        group_size = num_heads // self.key.shape[1] if num_heads > 1 else 1
        for row in _runs(patterns) if batches > 1 else [whole]:
            if num_heads == 1:
                yield (row, whole), (row, whole)
                continue
            for heads in _runs(patterns[row.start or 0]):
                # GQA: a part is within one KV head, or consists of whole groups of query heads.
                low = min(-(-heads.start // group_size) * group_size, heads.stop)
                high = max(heads.stop // group_size * group_size, heads.start)
                for first, stop in pairwise(sorted({heads.start, low, high, heads.stop})):
                    kv_heads = slice(first // group_size, -(-stop // group_size))
                    yield (row, slice(first, stop)), (row, kv_heads)

    @property
    def num_bytes(self) -> int:
        """Bytes of query, key and value."""
        return self.query.nbytes + self.key.nbytes + self.value.nbytes

    @property
    def shape(self) -> AttentionShape:
        """Batch, heads, head dimensions and itemsize, the inputs of the cost model."""
        return AttentionShape(
            batch=self.query.shape[0],
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_dim=self.query.shape[3],
            value_dim=self.value.shape[3],
            itemsize=self.query.dtype.itemsize,
            has_dropout=self.dropout is not None,
        )

    def make_plan(
        self,
        num_tasks: int,
        kind: Kind | str | None = None,
        seqlens: tuple[int, int] | None = None,
    ) -> Plan:
        """Divide this problem into tasks; see :func:`cqs.make_plan`.

        Args:
            num_tasks: Number of tasks.
            kind: Kind of the plan.
            seqlens: Numbers of queries and keys of the whole sequence if this is a shard.
        """
        cached = _cached_plan if type(num_tasks) is int and kind is None else make_plan
        seqlens = seqlens or (self.query.shape[2], self.key.shape[2])
        has_tiles = self.query.device.type == "cuda"
        if self.is_reproducible:  # another device may compute tensors of the host
            has_tiles = min(seqlens) >= GPU_TILE * num_tasks
        return cached(
            *seqlens,
            num_tasks=num_tasks,
            is_causal=self.is_causal,
            kind="quorums" if kind is None else kind,
            tile=GPU_TILE if has_tiles else 1,
            pattern=self.pattern,
        )

    def empty_answer(self) -> Partial:
        """Allocate the output, in the dtype and on the device of the query, and the LSE."""
        shape = (*self.query.shape[:3], self.value.shape[3])
        return Partial(
            self.query.new_empty(shape),
            self.query.new_empty(shape[:3], dtype=lse_dtype(self.query.dtype)),
        )


_cached_plan = lru_cache(maxsize=64)(make_plan)
"""Repeated calls skip the checks of its arguments, which must be hashable."""


def check_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = True,
    is_shard: bool = False,
    **options: Unpack[ProblemOptions],
) -> Problem:
    """Validate the arguments of an attention call and fill in defaults (scale, dropout seed).

    - A batch of 1 is expanded without a copy; autograd sums its gradients.
    - A pattern together with ``is_causal`` becomes the intersection of both.
    - The patterns ``causal()`` and ``sliding_window(None, None)`` become dense attention.
    - A head_dim of 0 is padded to 1.

    The arguments are those of :func:`cqs.attention`; with ``is_shard`` a bias may have the columns
    of a longer sequence.

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes, devices or the pattern's lengths do not fit together; ``scale``
            is not finite; or ``dropout_p`` is not in [0, 1).
        NotImplementedError: The pattern cannot be intersected with the causal mask; the device is
            neither CPU nor CUDA; or forward-mode or functorch derivatives are requested.
    """
    query, key, value = map(dense_value, _NAMES, (query, key, value))
    batch = 1
    for name, tensor in zip(_NAMES, (query, key, value), strict=True):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must be [batch, num_heads, seqlen, head_dim], got shape "
                f"{tuple(tensor.shape)}: use unsqueeze(1) for a single head, "
                "flatten(0, -4) for several batch dimensions"
            )
        check_kind(name, tensor, query.device)
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} must be on the CPU or a GPU, got {tensor.device}")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have dtype {query.dtype} of query, got {tensor.dtype}")
        batch = tensor.shape[0] if batch == 1 else batch
        if tensor.shape[0] not in (1, batch):
            raise ValueError(f"{name} must have a batch of 1 or {batch}, got {tensor.shape[0]}")
    if not value.shape[3]:
        raise ValueError(f"value must have a value_dim of at least 1, got {tuple(value.shape)}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"key and value must agree in heads and seqlen, got {tuple(key.shape)} "
            f"and {tuple(value.shape)}"
        )
    if key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key must have the head_dim of query, {query.shape[3]}, got {key.shape[3]}"
        )
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} "
            f"and {num_kv_heads}"
        )
    if not as_bool("enable_gqa", enable_gqa) and num_kv_heads not in (1, num_heads):
        raise ValueError(
            f"num_kv_heads must be 1 or num_heads, {num_heads}, without enable_gqa, "
            f"got {num_kv_heads}"
        )
    sizes = batch, num_heads, query.shape[2], key.shape[2]
    pattern, scores = options.get("pattern"), options.get("scores")
    if attn_mask is not None:
        attn_mask = dense_value("attn_mask", attn_mask)
        pattern, scores = add_mask(attn_mask, sizes, query.device, pattern, scores)
    is_causal = as_bool("is_causal", options.get("is_causal", False))
    if pattern is not None:
        check_is_pattern(pattern)
        is_causal, pattern = check_pattern(pattern, is_causal, *sizes)
    if not query.shape[3]:  # all scores are 0, as with a column of zeros, which kernels support
        query, key = pad(query, (0, 1)), pad(key, (0, 1))
    is_broadcast = not query.shape[0] == key.shape[0] == value.shape[0]
    if is_broadcast:
        query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (query, key, value))
    scale = query.shape[3] ** -0.5 if (given := options.get("scale")) is None else given
    factor = to_float(scale, "scale must be a number or None")
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, got {scale}")
    sinks = terms = None
    if scores is not None:
        sinks, terms = check_scores(scores, query, None if is_shard else key.shape[2])
    dropout_p, seed = options.get("dropout_p", 0.0), options.get("seed")
    probability = to_float(dropout_p, "dropout_p must be a number")
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    seed = None if seed is None else as_integer("seed", seed, 0)
    dropout = Dropout(probability, draw_seed() if seed is None else seed) if probability else None
    num_tasks = options.get("num_tasks")
    is_reproducible = options.get("reproducible", False)
    if is_reproducible is not False and as_bool("reproducible", is_reproducible):
        given = REPRODUCIBLE_TASKS if num_tasks is None else num_tasks
        num_tasks = as_integer("num_tasks", given, 1)
        needs_sum = is_broadcast and torch.is_grad_enabled()
        if needs_sum and any(tensor.requires_grad for tensor in (query, key, value)):
            raise NotImplementedError(
                "a batch of 1 is not broadcast in reproducible calls with gradients, whose sum "
                "depends on shards: pass query, key and value with equal batches"
            )
    fields = is_causal, factor, dropout, pattern, sinks, terms, num_tasks, is_reproducible
    return Problem(query, key, value, *fields)


def check_num_tasks(problem: Problem) -> None:
    """Raise ValueError for a number of tasks that ranks and streams do not have."""
    if problem.num_tasks is not None and not problem.is_reproducible:
        raise ValueError(
            f"num_tasks must be None without reproducible=True, got {problem.num_tasks}: ranks and "
            "streams choose their own tasks"
        )


def draw_seed() -> int:
    """Draw a dropout seed in [0, 2^63 - 1) from PyTorch's CPU generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


def _runs(values: Sequence[Any]) -> list[slice]:
    """Return the slices of equal neighbours."""
    marks = [i for i in range(1, len(values)) if values[i] != values[i - 1]]
    return list(starmap(slice, pairwise([0, *marks, len(values)])))
