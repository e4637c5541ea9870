"""The public door: one attention problem, checked once and trusted inside."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from cqs.dropout import Dropout
from cqs.partial import Partial, lse_dtype
from cqs.patterns import BoundPattern, Pattern, causal, sliding_window
from cqs.scheduler import AttentionShape, Plan, make_plan
from cqs.scheduler.arguments import as_bool, as_integer, to_float

GPU_TILE = 128
"""Tokens of a tile of the fast kernels."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """Tensors and options that fit together."""

    query: Tensor
    """``[batch, num_heads, seqlen_q, head_dim]``."""
    key: Tensor
    """``[batch, num_kv_heads, seqlen_kv, head_dim]``."""
    value: Tensor
    """``[batch, num_kv_heads, seqlen_kv, value_dim]``."""
    is_causal: bool
    scale: float
    dropout: Dropout | None = None
    pattern: Pattern | None = None
    """``None`` where :attr:`is_causal` says everything."""

    @property
    def bound_pattern(self) -> BoundPattern | None:
        """The pattern at the lengths of the tensors; all heads must have the same."""
        if self.pattern is None:
            return None
        return self.pattern.bind(self.query.shape[2], self.key.shape[2])

    @property
    def differs_by_head(self) -> bool:
        """Whether heads, or batch elements, have patterns of their own."""
        return self.pattern is not None and self.pattern.heads != (1, 1)

    def parts(self) -> Iterator[tuple[tuple[slice, slice], "Problem"]]:
        """Cut the problem where its pattern differs: by batch element, in it by head.

        Neighbours of one pattern stay together, heads as far as they have all queries of their key
        heads.

        Yields:
            The batch elements and heads of a part, and the part: all of it if there is no pattern.
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
                ),
            )

    def cuts(self) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Yield the batch elements and heads of each part, and them and its key heads."""
        for row in self._rows_of_parts():
            for heads, kv_heads in self._heads_of_parts(row.start or 0):
                yield (row, heads), (row, kv_heads)

    def _rows_of_parts(self) -> Iterator[slice]:
        """Yield batch elements that are computed together."""
        batches, num_heads = (1, 1) if self.pattern is None else self.pattern.heads
        if self.pattern is None or batches == 1:
            yield slice(None)
            return
        patterns = [
            tuple(self.pattern.head(batch, head) for head in range(num_heads))
            for batch in range(batches)
        ]
        first = 0
        for _, alike in groupby(patterns):
            stop = first + len(list(alike))
            yield slice(first, stop)
            first = stop

    def _heads_of_parts(self, batch: int) -> Iterator[tuple[slice, slice]]:
        """Yield heads that are computed together, and their key heads."""
        num_heads = 1 if self.pattern is None else self.pattern.heads[1]
        if self.pattern is None or num_heads == 1:
            yield slice(None), slice(None)
            return
        group_size = num_heads // self.key.shape[1]
        first = 0
        while first < num_heads:
            pattern, stop = self.pattern.head(batch, first), first + 1
            while stop < num_heads and self.pattern.head(batch, stop) == pattern:
                stop += 1
            if first % group_size:
                stop = min(stop, first + group_size - first % group_size)
            elif stop - first > group_size:
                stop -= stop % group_size
            yield slice(first, stop), slice(first // group_size, -(-stop // group_size))
            first = stop

    @property
    def shape(self) -> AttentionShape:
        """What the scheduler needs to know to predict costs."""
        return AttentionShape(
            batch=self.query.shape[0],
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_dim=self.query.shape[3],
            value_dim=self.value.shape[3],
            itemsize=self.query.element_size(),
            has_dropout=self.dropout is not None,
        )

    def make_plan(self, num_tasks: int, interest_set: Iterable[int] | None = None) -> Plan:
        """Plan this problem; see :func:`cqs.make_plan`."""
        return make_plan(
            self.query.shape[2],
            self.key.shape[2],
            num_tasks=num_tasks,
            is_causal=self.is_causal,
            interest_set=interest_set,
            tile=GPU_TILE if self.query.is_cuda else 1,
            pattern=self.pattern,
        )

    def empty_answer(self) -> Partial:
        """Allocate the answer: output in the dtype and device of the query, and its lse."""
        shape = (*self.query.shape[:3], self.value.shape[3])
        return Partial(
            self.query.new_empty(shape),
            self.query.new_empty(shape[:3], dtype=lse_dtype(self.query.dtype)),
        )


def check_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Problem:
    """Check what the user passed; fill in the default scale and, to drop out, a random seed.

    A batch of 1 is expanded to that of the other tensors, without a copy; autograd adds up its
    gradients. A causal problem with a pattern becomes one of their intersection, and the patterns
    ``causal()`` and ``sliding_window(None, None)`` become no pattern.

    Raises:
        TypeError: if an argument is of the wrong type or the tensors of an unsupported dtype.
        ValueError: if shapes, dtypes, devices or the pattern's lengths do not fit together,
            ``scale`` is not finite or ``dropout_p`` not in [0, 1).
        NotImplementedError: for patterns that combine into nothing known, for devices other than
            CPU and CUDA, and for derivatives other than autograd's backward pass.
    """
    tensors = {"query": query, "key": key, "value": value}
    query, key, value = (_as_plain(name, tensor) for name, tensor in tensors.items())
    batch = 1
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must be [batch, num_heads, seqlen, head_dim], got shape "
                f"{tuple(tensor.shape)}: use unsqueeze(1) for a single head, "
                "flatten(0, -4) for several batch dimensions"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}"
            )
        if tensor.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name} must be on the CPU or a GPU, got {tensor.device}")
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotImplementedError(f"{name} is inside torch.func.vmap or grad: not supported")
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent: no forward-mode derivatives")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but query is {query.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} but query is on {query.device}")
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
        raise ValueError(f"key has head_dim {key.shape[3]} but query has {query.shape[3]}")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_kv_heads, got {num_heads} "
            f"and {num_kv_heads}"
        )
    is_causal, pattern = check_pattern(
        pattern, as_bool("is_causal", is_causal), batch, num_heads, query.shape[2], key.shape[2]
    )
    if not query.shape[3]:  # all scores are 0, as of columns of zeros
        query, key = pad(query, (0, 1)), pad(key, (0, 1))
    query, key, value = (
        tensor if len(tensor) == batch else tensor.expand(batch, -1, -1, -1)
        for tensor in (query, key, value)
    )
    if scale is None:
        scale = query.shape[3] ** -0.5
    factor = to_float(scale, "scale must be a number or None")
    if not math.isfinite(factor):
        raise ValueError(f"scale must be finite, got {scale}")
    dropout = _check_dropout(dropout_p, seed)
    return Problem(query, key, value, is_causal, factor, dropout, pattern)


def _as_plain(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values, because kernels and messages read memory.

    Raises:
        TypeError: ``tensor`` is no tensor, is sparse or nested, or is of a subclass that computes
            by ``__torch_dispatch__``, such as a DTensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        # Autograd's zeros have no memory at all.
        return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):  # DTensor.to_local() may return one
        plain: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
        return plain
    raise TypeError(
        f"{name} must be a plain torch.Tensor, got {type(tensor).__name__}: convert it first "
        f"(a DTensor: {name}.to_local(), for cqs.distributed.attention)"
    )


def check_pattern(
    pattern: Pattern | None,
    is_causal: bool,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_kv: int,
) -> tuple[bool, Pattern | None]:
    """Return whether attention is causal and nothing else, and otherwise its pattern, if any.

    Raises:
        TypeError: if ``pattern`` is none.
        ValueError: if it is for other lengths, heads or batch elements.
        NotImplementedError: for patterns that combine into nothing known.
    """
    if pattern is None or pattern == sliding_window(None, None):
        return is_causal, None
    check_is_pattern(pattern)
    if pattern == causal():
        return True, None
    for name, has, needed in zip(
        ("batch", "num_heads"), (batch, num_heads), pattern.heads, strict=True
    ):
        if needed not in (1, has):
            raise ValueError(f"{pattern!r} needs {name} {needed}, got {has}")
    if is_causal:
        pattern = pattern & causal()
    for batch_element, head in product(*map(range, pattern.heads)):
        pattern.head(batch_element, head).bind(seqlen_q, seqlen_kv)  # raises if it cannot
    return False, pattern


def check_is_pattern(pattern: Pattern) -> None:
    """Raise TypeError unless ``pattern`` is one."""
    if not isinstance(pattern, Pattern):
        raise TypeError(
            "pattern must be one of cqs.patterns, per_head([[...], ...]) of several or "
            f"from_mask(mask) of a mask, got {type(pattern).__name__}"
        )


def _check_dropout(dropout_p: float, seed: int | None) -> Dropout | None:
    probability = to_float(dropout_p, "dropout_p must be a number")
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if seed is not None:
        seed = as_integer("seed", seed, 0)
    if not probability:
        return None
    if seed is None:
        seed = draw_seed()
    return Dropout(probability, seed)


def draw_seed() -> int:
    """Draw a seed for dropout from PyTorch's generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))
