"""Checks of the tensors of a call: plain, dense, of a supported dtype and device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors as ``torch.autocast`` casts those of scaled_dot_product_attention.

    Where it is enabled for the device of a tensor, that is floating-point and not float64, the
    tensor is cast to its dtype. Other arguments are returned as they are.
    """
    return tuple(map(_autocast, tensors)) if torch._C._is_any_autocast_enabled() else tensors


def _autocast(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or (device := tensor.device.type) not in ("cpu", "cuda"):
        return tensor
    is_cast = torch.is_autocast_enabled(device) and tensor.is_floating_point()
    if not is_cast or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def check_kind(
    name: str, tensor: Tensor, device: torch.device, *, allows_bool: bool = False
) -> None:
    """Raise unless a tensor has a supported dtype and is on the device of the query."""
    if tensor.dtype not in DTYPES and not (allows_bool and tensor.dtype == torch.bool):
        supported = "bool, " * allows_bool + "float64, float32, bfloat16 or float16"
        raise TypeError(f"{name} must be {supported}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of query, {device}, got {tensor.device}")


def with_four_dimensions(name: str, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a tensor of four dimensions that are 1 or those of ``sizes``, or raise ValueError.

    Args:
        name: Name of the option.
        tensor: The option, which may lack the first dimensions.
        sizes: Batch, query heads, queries and keys.
    """
    shape = (1,) * (4 - tensor.ndim) + tuple(tensor.shape)
    if len(shape) > 4 or any(n not in (1, most) for n, most in zip(shape, sizes, strict=True)):
        raise ValueError(
            f"{name} must be broadcastable to [batch, num_heads, seqlen_q, seqlen_kv], "
            f"{list(sizes)}, got {list(tensor.shape)}"
        )
    return tensor.view(shape) if tensor.ndim < 4 else tensor


def positions_of(ranges: Sequence[range], device: torch.device) -> Tensor:
    """Return the tokens of ranges, one range after another, int64 on a device."""
    positions = [torch.arange(r.start, r.stop, device=device) for r in ranges]
    return positions[0] if len(positions) == 1 else torch.cat(positions)


def dense_value(name: str, tensor: Tensor) -> Tensor:
    """Return a plain tensor whose memory has its values.

    Raises:
        TypeError: The argument is not a tensor, or is not dense.
        NotImplementedError: Forward-mode or functorch derivatives are requested.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        tensor = _plain_value(name, tensor)
    elif tensor._is_zerotensor():  # a gradient of autograd that has no memory
        tensor = tensor.clone()
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{name} must be a plain tensor, got one inside torch.func.vmap or grad: call "
            "cqs.attention outside of the transformation"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(
            f"{name} must not have a tangent, got a dual tensor: use reverse-mode derivatives"
        )
    return tensor.resolve_neg()  # a negative bit is not applied in memory


def _plain_value(name: str, tensor: Tensor) -> Tensor:
    """Return the plain tensor of a subclass with ``__torch_dispatch__``, or raise TypeError."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, FakeTensor) and torch._C._len_torch_dispatch_stack():
        return tensor  # an argument of an operator that is being traced
    if isinstance(tensor, AsyncCollectiveTensor):  # DTensor.to_local() may return one
        plain: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
        return plain
    raise TypeError(
        f"{name} must be a plain torch.Tensor, got {type(tensor).__name__}: convert it first "
        f"(a DTensor: {name}.to_local(), for cqs.distributed.attention)"
    )
