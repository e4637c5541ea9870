"""Backend ``flex``: PyTorch's FlexAttention on GPUs, for scores with a function.

PyTorch compiles a kernel, in seconds, at the first call with each function.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from cqs.partial import Partial, has_triton
from cqs.problem.score_terms import PairTerms
from cqs.worker.backend import CallBackend
from cqs.worker.operands import Operands

_LEAST_HEAD_DIM = 16


class _Flex(CallBackend):
    """FlexAttention; each call has a kernel for its score function.

    It does not compute gradients of tensors that the function reads, because PyTorch adds them up
    in a nondeterministic order.
    """

    name = "flex"
    required_terms = frozenset(("score_mod",))
    supported_terms = frozenset(("softcap", "alibi_slopes", "bias", "score_mod"))

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        if query.device.type != "cuda":
            return f"requires CUDA tensors, got {query.device}"
        if query.dtype == torch.float64:
            return "requires float32, bfloat16 or float16, got torch.float64"
        if (least := min(query.shape[3], value.shape[3])) < _LEAST_HEAD_DIM:
            return f"requires a head_dim of at least {_LEAST_HEAD_DIM}, got {least}"
        return None if has_triton() else "requires Triton, which is not installed"

    def attend(self, operands: Operands) -> Partial:
        return _attend_compiled(operands, operands.query, operands.key, operands.value)

    def differentiate(
        self, operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients from those of the call's own output and LSE.

        The output of the whole problem is ``sum(w * part)`` with ``w = exp(lse of part - lse)``. By
        it the gradient of a part is ``w * grad_output``, and that of its LSE ``w * rowsum(
        (part - output) * grad_output)``.
        """
        tensors = operands.query, operands.key, operands.value
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            part, part_lse = _attend_compiled(operands, *leaves)
        weights = torch.exp(part_lse.detach() - lse)
        row_sums = ((part.detach().float() - output.float()) * grad_output.float()).sum(-1)
        grad_part = (weights.unsqueeze(-1) * grad_output).to(part.dtype)
        query, key, value = torch.autograd.grad(
            (part, part_lse), leaves, (grad_part, weights * row_sums)
        )
        return query, key, value


FLEX = _Flex()


def _attend_compiled(operands: Operands, query: Tensor, key: Tensor, value: Tensor) -> Partial:
    """Compute output and LSE by FlexAttention, compiled once for each kind of score function."""
    from torch.nn.attention.flex_attention import AuxRequest

    pairs = operands.terms
    assert pairs is not None
    terms, bias = pairs.terms, pairs.bias
    kind = (
        getattr(terms.score_mod, "__code__", terms.score_mod),
        bool(terms.softcap),
        None if terms.alibi_slopes is None else terms.alibi_slopes.shape[0],
        None if bias is None else tuple(size != 1 for size in bias.shape),
        operands.is_causal,
        query.dtype,
        query.requires_grad,
    )
    output, aux = _compile_kind(kind)(
        query,
        key,
        value,
        score_mod=_score_mod_of(pairs, operands),
        scale=1.0,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return Partial(output, aux.lse)


@lru_cache(maxsize=128)
def _compile_kind(kind: Hashable) -> Callable[..., Any]:
    """Return compiled FlexAttention for calls of one kind.

    PyTorch limits the number of compilations of a code object. Each kind has one of its own.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def attend(*args: Any, **options: Any) -> Any:
        return flex_attention(*args, **options)

    own = FunctionType(attend.__code__.replace(), globals(), "attend", None, attend.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True)
    return compiled


def _score_mod_of(pairs: PairTerms, operands: Operands) -> Callable[..., Tensor]:
    """Return FlexAttention's score function of a call: scale, all terms and the causal mask.

    FlexAttention passes numbers of batch elements, heads, rows and columns of the call. Bias and
    causal mask take these. ALiBi and the user's function take the positions of rows and columns in
    the whole sequence, ``pairs.positions``; the latter also batch element and head of the problem.

    Scale and soft cap are read from tensors, so that PyTorch does not compile again for others.
    """
    terms, score_mod = pairs.terms, pairs.terms.score_mod
    assert pairs.positions is not None and score_mod is not None
    queries, keys = pairs.positions
    shifted = queries + terms.distance  # ALiBi is 0 for a key at this position
    is_causal, slopes = operands.is_causal, terms.alibi_slopes
    scale, cap = queries.new_tensor([operands.scale, terms.softcap], dtype=torch.float32)
    is_capped = bool(terms.softcap)
    first_batch, first_head = terms.first_batch, terms.first_head
    has_dim = [] if pairs.bias is None else [size != 1 for size in pairs.bias.shape]
    bias = None if pairs.bias is None else pairs.bias.squeeze()
    one_batch = slopes is None or slopes.shape[0] == 1

    def function(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        score = scale * score
        if is_capped:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            slope = slopes[0, head] if one_batch else slopes[batch, head]
            score = score - slope * (shifted[row] - keys[column]).abs()
        if bias is not None:
            indices = (batch, head, row, column)
            chosen = tuple(index for index, has in zip(indices, has_dim, strict=True) if has)
            score = score + (bias[chosen] if chosen else bias)
        if first_batch:
            batch = batch + first_batch
        if first_head:
            head = head + first_head
        modified: Tensor = score_mod(score, batch, head, queries[row], keys[column])
        return torch.where(row >= column, modified, -torch.inf) if is_causal else modified

    return function
