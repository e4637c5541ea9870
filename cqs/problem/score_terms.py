"""What changes the scaled products of queries and keys before the softmax."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cqs.partial import lse_dtype
from cqs.problem.tensors import positions_of
from cqs.ranges import rows_of
from cqs.scheduler.task import join_ranges

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of score, batch element, query head, query and key, as of PyTorch's FlexAttention."""

_ALL = slice(None)
_OF_VMAP = "vmap: ", "have storage"
"""Parts of the errors of torch.vmap about functions that read values of tensors."""


@dataclass(frozen=True, eq=False)
class ScoreTerms:
    """Soft cap, ALiBi, bias and score function, of the batch elements and heads at hand.

    They apply in this order to ``scale * query @ key^T``. Positions are those in the whole
    sequence.
    """

    softcap: float = 0.0
    """Each score s becomes ``softcap * tanh(s / softcap)``; 0 for none."""
    alibi_slopes: Tensor | None = None
    """``[1 or batch, num_heads]``, float32 (float64 for float64 tensors)."""
    bias: Tensor | None = None
    """Added, ``[1 or batch, 1 or num_heads, 1 or rows_q, 1 or rows_kv]``."""
    score_mod: ScoreMod | None = None
    """Function of the score so far."""
    distance: int = 0
    """``seqlen_kv - seqlen_q``: ALiBi is 0 where a key is at the position of the query plus it."""
    first_batch: int = 0
    """Index, in the whole batch, of the first batch element at hand."""
    first_head: int = 0
    """Index, among all query heads, of the first head at hand."""
    captured: tuple[Tensor, ...] = ()
    """Tensors that ``score_mod`` reads and that require gradients, then the slopes if they do."""
    slopes_require_grad: bool = False
    """Whether the last of ``captured`` are the slopes."""
    read: tuple[Tensor, ...] = ()
    """All tensors that ``score_mod`` reads, if gradients are enabled."""
    held: tuple[tuple[range, ...], tuple[range, ...]] | None = None
    """Positions of the rows and columns of ``bias``; ``None`` means all."""
    bias_requires_grad: bool = False
    """Whether the gradient of the bias is required."""
    sums: tuple[Tensor, ...] = ()
    """In a backward pass, sums to which gradients are added: that of the bias, if required, then
    those of ``captured``."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the terms that are not trivial, as backends list those that they support."""
        terms = {
            "softcap": bool(self.softcap),
            "alibi_slopes": self.alibi_slopes is not None,
            "bias": self.bias is not None,
            "gradient of bias": self.bias_requires_grad,
            "score_mod": self.score_mod is not None,
            "gradient of score_mod": bool(self.captured),
        }
        return frozenset(name for name, is_given in terms.items() if is_given)

    @property
    def depends_on_positions(self) -> bool:
        """Whether a score depends on more than query and key."""
        return bool(self.names - {"softcap"})

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Tensors whose gradients are required, in the order of ``sums``."""
        if self.bias is None or not self.bias_requires_grad:
            return self.captured
        return self.bias, *self.captured

    @property
    def watched(self) -> tuple[Tensor, ...]:
        """Tensors that must not be written to between the passes, besides the bias."""
        slopes = () if self.alibi_slopes is None else (self.alibi_slopes,)
        return *slopes, *self.read

    def part(self, row: slice, heads: slice) -> "ScoreTerms":
        """Return the terms of some batch elements and query heads."""
        slopes, bias = (
            None if tensor is None else select_heads(tensor, row, heads)
            for tensor in (self.alibi_slopes, self.bias)
        )
        sums = self.sums
        if self.bias_requires_grad and sums:
            sums = select_heads(sums[0], row, heads), *sums[1:]
        return replace(
            self,
            alibi_slopes=slopes,
            bias=bias,
            sums=sums,
            first_batch=self.first_batch + (row.start or 0),
            first_head=self.first_head + (heads.start or 0),
        )

    def cut(self, tensor: Tensor, queries: range, keys: range) -> Tensor:
        """Return the part of the bias held, or of its sum, of adjacent tokens, as a view."""
        return _take(tensor, *self._places(tensor, [queries], [keys]))

    def _places(
        self, tensor: Tensor, queries: Sequence[range], keys: Sequence[range]
    ) -> "list[slice | Tensor]":
        """Return rows and columns of positions in the bias held, or in its sum."""
        sides = zip(tensor.shape[2:], (queries, keys), self.held or (None, None), strict=True)
        return [
            _ALL if size == 1 else _index(wanted, held, tensor.device)
            for size, wanted, held in sides
        ]

    def add_bias_sums(self, chunk: "ScoreTerms | None", batch: int, heads: range) -> None:
        """Add the sum of the bias's gradient of a chunk, whose positions it holds."""
        if not self.bias_requires_grad or not self.sums or chunk is None or chunk.held is None:
            return
        total = select_heads(self.sums[0], slice(batch, batch + 1), slice(heads.start, heads.stop))
        (queries,), (keys,) = chunk.held
        self.cut(total, queries, keys).add_(chunk.sums[0].to(total.device))

    def identity(self) -> dict[str, Any]:
        """Return what distinguishes the terms from others, in JSON types."""
        fields = {
            "softcap": self.softcap or None,
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.tolist(),
            "bias": None if self.bias is None else _digest(self.bias),
        }
        return {name: value for name, value in fields.items() if value is not None}

    def with_sums(self, dtype: torch.dtype) -> "ScoreTerms":
        """Return the terms with zeros as sums of the gradients."""
        return replace(self, sums=tuple(torch.zeros_like(t, dtype=dtype) for t in self.leaves))

    def pair_terms(
        self, device: torch.device, queries: Sequence[range], keys: Sequence[range]
    ) -> "PairTerms":
        """Return the terms of pairs of these positions, ascending ranges."""
        positions = None
        if self.alibi_slopes is not None or self.score_mod is not None:
            positions = positions_of(queries, device), positions_of(keys, device)
        if self.bias is None:
            return PairTerms(self, positions)
        rows, columns = self._places(self.bias, queries, keys)
        bias = _take(self.bias, rows, columns)
        if not (self.bias_requires_grad and self.sums):
            return PairTerms(self, positions, bias)
        indices = zip(self.bias.shape[2:], (rows, columns), strict=True)
        places = [torch.arange(size, device=bias.device)[place] for size, place in indices]
        return PairTerms(self, positions, bias, tuple(places))


class PairTerms(NamedTuple):
    """The terms of a rectangle of pairs."""

    terms: ScoreTerms
    """The terms of all pairs."""
    positions: tuple[Tensor, Tensor] | None = None
    """Positions of queries and keys, int64; ``None`` if no term depends on them."""
    bias: Tensor | None = None
    """``[1 or batch, 1 or num_heads, 1 or queries, 1 or keys]``."""
    places: tuple[Tensor, ...] = ()
    """Rows and columns of ``bias`` in the sum of its gradients, int64; empty without a sum."""

    def select(self, queries: Any, keys: slice = _ALL) -> "PairTerms":
        """Return the terms of some of the rows, a slice or int64 indices, and of some columns."""
        positions = self.positions and (self.positions[0][queries], self.positions[1][keys])
        if self.bias is None:
            return self._replace(positions=positions)
        sides = zip(self.places, self.bias.shape[2:], (queries, keys), strict=False)
        places = tuple(held if size == 1 else held[wanted] for held, size, wanted in sides)
        bias = _take(self.bias, queries, keys)
        return self._replace(positions=positions, bias=bias, places=places)

    def apply(self, scores: Tensor) -> Tensor:
        """Return scores ``[batch, num_heads, queries, keys]``, scaled products, after all terms."""
        return self._modified(self._shifted(self._capped(scores)))

    def _capped(self, scores: Tensor) -> Tensor:
        if not (cap := self.terms.softcap):
            return scores
        return cap * torch.tanh(scores / cap)

    def _shifted(self, scores: Tensor) -> Tensor:
        """Return the scores after ALiBi and bias."""
        if self.terms.alibi_slopes is not None:
            scores = scores + self.alibi(scores.dtype)
        return scores if self.bias is None else scores + self.bias.to(scores.dtype)

    def _modified(self, scores: Tensor) -> Tensor:
        """Return the scores after the score function, in new memory if there is one."""
        terms = self.terms
        if terms.score_mod is None or not scores.numel():
            return scores
        assert self.positions is not None
        batch, num_heads, *_ = scores.shape
        batches, heads = (
            first + torch.arange(number, device=scores.device)
            for first, number in ((terms.first_batch, batch), (terms.first_head, num_heads))
        )
        try:
            modified = _over_pairs(terms.score_mod)(scores, batches, heads, *self.positions)
        except RuntimeError as error:
            if not any(text in str(error) for text in _OF_VMAP):
                raise
            raise ValueError(
                "scores.score_mod must be made of PyTorch's functions: use torch.where in place of "
                "if, and no .item(), NumPy or random numbers"
            ) from error
        return modified.to(scores.dtype, copy=True)  # it may be a view of a captured tensor

    def with_errors(self, scores: Tensor, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores after all terms, and what their rounding errors are proportional to.

        Args:
            scores: Scaled products, ``[batch, num_heads, queries, keys]``.
            magnitudes: What their rounding errors are proportional to, in the same shape.
        """
        capped = self._capped(scores)  # its derivative is at most 1
        shifted = self._shifted(capped)
        magnitudes = magnitudes + (shifted - capped).abs()
        if self.terms.score_mod is None:
            return shifted, magnitudes
        ones = torch.ones_like(shifted)
        slopes = self._differentiate_mod(shifted, lambda _: ones).abs()
        modified = self._modified(shifted)
        errors = slopes.nan_to_num() * magnitudes + modified.abs()
        return modified, errors.masked_fill(~errors.isfinite(), 0)

    def addend(self) -> Tensor:
        """Return ALiBi and bias, float32, ``[batch, num_heads, queries, keys]`` or 1 for each."""
        if self.bias is None:
            return self.alibi(torch.float32)
        bias = self.bias.float()
        return bias if self.terms.alibi_slopes is None else bias + self.alibi(torch.float32)

    def alibi(self, dtype: torch.dtype) -> Tensor:
        """Return the bias of ALiBi, ``[1 or batch, num_heads, queries, keys]`` (arXiv 2108.12409).

        It is ``-slope * abs(query + seqlen_kv - seqlen_q - key)``.
        """
        assert self.terms.alibi_slopes is not None
        return -self.terms.alibi_slopes.to(dtype)[..., None, None] * self._apart(dtype)

    def _apart(self, dtype: torch.dtype) -> Tensor:
        """Return the distances that ALiBi multiplies by a slope, ``[queries, keys]``."""
        assert self.positions is not None
        queries, keys = self.positions
        return (queries.unsqueeze(-1) + (self.terms.distance - keys)).abs_().to(dtype)

    def differentiate(self, scaled: Tensor, grad_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the gradient of the scaled products, and add those of the leaves to their sums.

        Args:
            scaled: Scaled products, ``[batch, num_heads, queries, keys]``.
            grad_of: Returns the gradient of the scores that it is given, 0 for masked pairs.
        """
        terms = self.terms
        capped = self._capped(scaled)
        shifted = self._shifted(capped)
        if terms.score_mod is None:
            gradient = grad_of(shifted if shifted is not capped else capped.clone())
        else:
            gradient = self._differentiate_mod(shifted, grad_of)
        if self.bias is not None and self.places:
            rows, columns = self.places
            terms.sums[0][:, :, rows[:, None], columns] += gradient.sum_to_size(self.bias.shape)
        if terms.slopes_require_grad and terms.sums:
            total, (batch, num_heads, *_) = terms.sums[-1], gradient.shape
            row = slice(terms.first_batch, terms.first_batch + batch)
            heads = slice(terms.first_head, terms.first_head + num_heads)
            total = select_heads(total.view(-1, total.shape[-1]), row, heads)
            total -= (gradient * self._apart(gradient.dtype)).sum((2, 3)).sum_to_size(total.shape)
        if terms.softcap:  # of masked pairs, the product may be NaN
            slopes = 1 - (capped / terms.softcap) ** 2
            gradient = (gradient * slopes).masked_fill_(gradient == 0, 0)
        return gradient

    def _differentiate_mod(self, scores: Tensor, grad_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the gradient of the scores before the score function; see :meth:`differentiate`.

        It must not run within an operator of PyTorch, where autograd is off.
        """
        terms, leaf = self.terms, scores.detach().requires_grad_()
        number = len(terms.captured) - terms.slopes_require_grad
        captured = terms.captured[:number] if terms.sums else ()
        with torch.enable_grad():
            modified = self._modified(leaf.clone())  # the function may write to it
            gradient = grad_of(modified.detach().clone())
            inputs, gradients = (leaf, *captured), tuple[Tensor | None, ...]()
            if modified.requires_grad:
                gradients = torch.autograd.grad(modified, inputs, gradient, allow_unused=True)
        sums = terms.sums[terms.bias_requires_grad :]
        grad_score, *grads_captured = gradients or [None] * len(inputs)
        for tensor, total, part in zip(captured, sums, grads_captured, strict=False):
            if part is None:
                raise ValueError(
                    "scores.score_mod must read tensors that require gradients from its closure, "
                    f"got a function that reads another copy of one, {list(tensor.shape)}, here"
                )
            total += part
        if grad_score is None:
            return torch.zeros_like(gradient)
        # The function may have an infinite derivative where a pair is masked out.
        return grad_score.masked_fill(gradient == 0, 0)


class Reads(TorchFunctionMode):
    """The tensors that a score function reads besides its arguments, however it gets them."""

    def __init__(self, score_mod: ScoreMod, like: Tensor) -> None:
        """Call the function for one pair, in the dtype of scores and on the device of ``like``."""
        super().__init__()
        self._read: dict[int, Tensor] = {}
        self._made: dict[int, Any] = {}
        self._modified: Tensor | None = None

        def function(*arguments: Tensor) -> Tensor:
            with self:
                modified = score_mod(*arguments)
            self._add(modified)
            return modified

        index = torch.zeros(1, dtype=torch.int64, device=like.device)
        with suppress(Exception):  # the call itself raises it
            score = torch.zeros((1, 1, 1, 1), dtype=lse_dtype(like.dtype), device=like.device)
            self._modified = _over_pairs(function)(score, *[index] * 4)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the tensors that an operation reads, and those that it makes."""
        self._add((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._made.update((id(value), value) for value in tree_leaves(result))
        return result

    def _add(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and not is_functorch_wrapped_tensor(tensor):
                if id(tensor) not in self._made:
                    self._read[id(tensor)] = tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All these tensors."""
        return tuple(self._read.values())

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Those on which the score depends and that require gradients, and other such leaves."""
        given = {get_gradient_edge(leaf): leaf for leaf in self.tensors if leaf.requires_grad}
        if self._modified is None:
            return tuple(given.values())
        if not self._modified.requires_grad:
            return ()
        leaves: dict[int, Tensor] = {}
        edges, seen = [get_gradient_edge(self._modified)], set()
        while edges:
            edge = edges.pop()
            tensor = given.get(edge, getattr(edge.node, "variable", None))
            if tensor is not None:  # beyond it are gradients that autograd computes
                leaves[id(tensor)] = tensor
            elif edge not in seen:
                seen.add(edge)
                edges += [GradientEdge(node, i) for node, i in edge.node.next_functions if node]
        return tuple(leaves.values())


def _digest(tensor: Tensor) -> str:
    """Return a hash of shape, dtype and values of a tensor."""
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{values.dtype}{list(values.shape)}".encode(), digest_size=16)
    digest.update(values.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _over_pairs(score_mod: ScoreMod) -> Callable[..., Tensor]:
    """Return the function of scores ``[batch, num_heads, queries, keys]`` and four vectors."""

    def function(*arguments: Tensor) -> Tensor:
        modified: Any = score_mod(*arguments)
        if not isinstance(modified, Tensor) or not modified.is_floating_point() or modified.ndim:
            kind = type(modified).__name__
            if isinstance(modified, Tensor):
                kind = f"{modified.dtype} of shape {list(modified.shape)}"
            raise TypeError(
                f"scores.score_mod must return a floating-point scalar tensor, got {kind}"
            )
        return modified

    for vector in (4, 3, 2, 1):  # keys are the innermost dimension, batch elements the outermost
        dims: tuple[int | None, ...] = tuple(0 if i in (0, vector) else None for i in range(5))
        function = torch.vmap(function, dims)
    return function


def select_heads(tensor: Tensor, row: slice, heads: slice) -> Tensor:
    """Return some batch elements and heads of a tensor, which may have one for all."""
    if tensor.shape[0] != 1:
        tensor = tensor[row]
    return tensor if tensor.shape[1] == 1 else tensor[:, heads]


def _take(tensor: Tensor, rows: Any, columns: Any) -> Tensor:
    """Return rows and columns of a tensor, which may have one for all."""
    if tensor.shape[2] != 1:
        tensor = tensor[:, :, rows]
    return tensor if tensor.shape[3] == 1 else tensor[:, :, :, columns]


def _index(
    wanted: Sequence[range], held: Sequence[range] | None, device: torch.device
) -> "slice | Tensor":
    """Return the rows of positions in a tensor of held positions; ``None`` means all are held."""
    rows = wanted if held is None else [rows_of(tokens, held) for tokens in wanted if tokens]
    first, *others = join_ranges(rows) or [range(0)]
    return positions_of([first, *others], device) if others else slice(first.start, first.stop)
