"""FlashAttention-4 for NVIDIA's Hopper GPUs, from the optional package flash-attn-4.

It compiles a kernel at the first call of each kind, in seconds.
"""

from functools import cache
from importlib import metadata

import torch
from torch import Tensor

from cqs.partial import Partial
from cqs.worker.operands import (
    why_not_half_precision_on_gpu,
    with_positive_scale,
    with_sign_of,
)

_VERSIONS = tuple(f"4.0.0b{beta}" for beta in range(32, 37))
"""Their private functions and kernels agree; no public function takes the lse of the whole."""
_HEAD_DIMS = range(32, 257, 32)
"""Many others get wrong gradients of queries: two of the kernels pad to different multiples."""


def why_not_flash(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Say why FlashAttention-4 cannot take these tensors, or return None if it can."""
    if reason := why_not_half_precision_on_gpu(query, value, _HEAD_DIMS):
        return reason
    if (capability := torch.cuda.get_device_capability(query.device))[0] != 9:
        return f"needs compute capability 9.x, got {capability[0]}.{capability[1]}"
    if (version := _installed_version()) is None:
        return "needs the package flash-attn-4, which is not installed"
    if version not in _VERSIONS:
        return f"needs flash-attn-4 from {_VERSIONS[0]} to {_VERSIONS[-1]}, got {version}"
    if error := _import_error():
        return f"needs flash-attn-4, which cannot be imported: {error}"
    return None


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> Partial:
    """Attend with FlashAttention-4; arguments as for the reference, none of them empty.

    Where a row meets NaN its lse is -inf, as if it saw no key; NaN is put back.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

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
    return Partial(
        output, lse.masked_fill_((lse == -torch.inf) & output[..., 0].isnan(), torch.nan)
    )


def gradients_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients with FlashAttention-4, added up in a fixed order.

    Arguments as for the reference. A row that sees no key goes in with lse +inf, so that all of
    its probabilities are 0: of -inf the kernel makes 0.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    positive_query, positive_scale = with_positive_scale(query, scale)
    tensors = positive_query, key, value, output, grad_output
    with torch.cuda.device_of(query):
        gradients = _flash_attn_bwd(
            *(tensor.transpose(1, 2) for tensor in tensors),
            lse.masked_fill(lse == -torch.inf, torch.inf),
            softmax_scale=positive_scale,
            causal=is_causal,
            deterministic=True,
        )
    grad_query, grad_key, grad_value = (gradient.transpose(1, 2) for gradient in gradients)
    return with_sign_of(scale, grad_query), grad_key, grad_value


@cache
def _import_error() -> str | None:
    try:
        import flash_attn.cute.interface  # noqa: F401
    except Exception as error:  # its compiler looks at the machine and may raise anything
        return repr(error)
    return None


@cache
def _installed_version() -> str | None:
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None
