"""Backend ``flash``: FlashAttention-4, from the optional package flash-attn-4.

The package compiles a kernel, in seconds, at the first call of each kind.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata

import torch
from torch import Tensor

from cqs.partial import Partial
from cqs.worker.backend import CallBackend
from cqs.worker.operands import (
    Operands,
    why_not_half_precision_on_gpu,
    with_positive_scale,
    with_sign_of,
)

_VERSIONS = tuple(f"4.0.0b{beta}" for beta in range(32, 37))
"""Supported versions: their private functions and kernels agree. The private functions are needed
because no public function accepts the LSE of the whole problem."""
_HEAD_DIMS = range(32, 257, 32)
"""Many other head_dims give wrong dQ, because two of the kernels pad to different multiples."""
_LARGEST_HEAD_DIM = {9: 256, 10: 128, 11: 128}
"""Largest head_dim by compute capability. The kernels for 10.x and 11.x were never run here."""

_SQUARE_TILE = 128
"""Causal squares are cut at a multiple of this number of rows."""
_LONGEST_SQUARE = 32_768
"""Most rows of a causal square that the backward kernel computes in one call. Longer squares take
up to 44 % longer in one call than in parts (benchmarks/journal/kernels.md)."""


class _Flash(CallBackend):
    """FlashAttention-4; its gradients are deterministic."""

    name = "flash"

    def why_not(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        if reason := why_not_half_precision_on_gpu(query, value, _HEAD_DIMS):
            return reason
        capability = torch.cuda.get_device_capability(query.device)
        if capability[0] not in _LARGEST_HEAD_DIM:  # 12.x has no deterministic gradients
            return f"requires compute capability 9.x to 11.x, got {capability[0]}.{capability[1]}"
        if query.shape[-1] > (largest := _LARGEST_HEAD_DIM[capability[0]]):
            return f"requires a head_dim up to {largest} on this GPU, got {query.shape[-1]}"
        return _why_not_importable()

    def attend(self, operands: Operands) -> Partial:
        """Compute output and LSE of full or causal attention in one call of the kernel.

        Other options have no effect here: :meth:`why_not` and the class exclude them. The kernel
        requires a positive scale, so the query takes the sign of a negative one.
        """
        from flash_attn.cute.interface import _flash_attn_fwd

        query, key, value, is_causal, scale, *_ = operands
        query, scale = with_positive_scale(query, scale)
        output = query.new_empty(query.shape)
        with torch.cuda.device_of(query):
            _, lse, *_ = _flash_attn_fwd(
                *(tensor.transpose(1, 2) for tensor in (query, key, value)),
                softmax_scale=scale,
                causal=is_causal,
                return_lse=True,
                out=output.transpose(1, 2),
            )
        # For a row that reads NaN the kernel returns LSE -inf.
        return Partial(
            output, lse.masked_fill_((lse == -torch.inf) & output[..., 0].isnan(), torch.nan)
        )

    def differentiate(
        self, operands: Operands, grad_output: Tensor, output: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, is_causal, scale, *_ = operands
        # The kernel replaces an LSE of -inf by 0. With +inf all probabilities of the row are 0.
        positive_query, positive_scale = with_positive_scale(query, scale)
        query_tensors = (
            positive_query,
            grad_output,
            output,
            lse.masked_fill(lse == -torch.inf, torch.inf),
        )
        key_tensors = key, value
        if not is_causal or query.shape[2] <= _LONGEST_SQUARE:
            grads = _gradients(query_tensors, key_tensors, is_causal, positive_scale)
        else:
            grads = tuple(map(_new_sum, (query, key, value)))
            for rows, columns in _cut_square(range(query.shape[2])):
                parts = _gradients(
                    [tensor[:, :, rows.start : rows.stop] for tensor in query_tensors],
                    [tensor[:, :, columns.start : columns.stop] for tensor in key_tensors],
                    rows == columns,
                    positive_scale,
                )
                for total, part, tokens in zip(grads, parts, (rows, columns, columns), strict=True):
                    total[:, :, tokens.start : tokens.stop] += part
        grad_query, grad_key, grad_value = grads
        return with_sign_of(scale, grad_query), grad_key, grad_value


def _cut_square(tokens: range) -> Iterator[tuple[range, range]]:
    """Cut a causal square into rectangles and shorter causal squares: pairs of rows and columns.

    Example:
        >>> [(len(rows), len(columns)) for rows, columns in _cut_square(range(40_000))]
        [(19968, 19968), (20032, 19968), (20032, 20032)]
    """
    if len(tokens) <= _LONGEST_SQUARE:
        yield tokens, tokens
        return
    half = len(tokens) // 2 // _SQUARE_TILE * _SQUARE_TILE
    first, second = tokens[:half], tokens[half:]
    yield from _cut_square(first)
    yield second, first
    yield from _cut_square(second)


def _new_sum(tensor: Tensor) -> Tensor:
    """Return float32 zeros in the memory layout of the kernels' gradients, for fast addition."""
    batch, num_heads, seqlen, dim = tensor.shape
    return tensor.new_zeros(batch, seqlen, num_heads, dim, dtype=torch.float32).transpose(1, 2)


def _gradients(
    query_tensors: Sequence[Tensor], key_tensors: Sequence[Tensor], is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Call the backward kernels.

    Args:
        query_tensors: Query, gradient of the output, output and LSE.
        key_tensors: Key and value.
        is_causal: Whether the call is a causal square.
        scale: Positive factor on the scores.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    query, grad_output, output, lse = query_tensors
    tensors = query, *key_tensors, output, grad_output
    with torch.cuda.device_of(query):
        gradients = _flash_attn_bwd(
            *(tensor.transpose(1, 2) for tensor in tensors),
            lse,
            softmax_scale=scale,
            causal=is_causal,
            deterministic=True,
        )
    return tuple(gradient.transpose(1, 2) for gradient in gradients)


@cache
def _why_not_importable() -> str | None:
    """Return why the package cannot be used, or None if it can."""
    try:
        version = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "requires the package flash-attn-4, which is not installed"
    if version not in _VERSIONS:
        return f"requires flash-attn-4 from {_VERSIONS[0]} to {_VERSIONS[-1]}, got {version}"
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception as error:  # its compiler inspects the machine and may raise anything
        return f"requires flash-attn-4, which cannot be imported: {error!r}"
    return None


FLASH = _Flash()
