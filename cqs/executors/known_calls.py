"""Results that depend on the signature of a call alone, found again in later calls.

Checks, plan and choice of a backend depend on sizes, dtypes, devices, modes and options. They take
0.1 ms, as long as a CPU takes for a hundred tokens, so they are made once for each signature.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

_Result = TypeVar("_Result")


def find_known(
    make: Callable[..., _Result | None], query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> _Result | None:
    """Return the result of ``make`` for calls with these sizes, dtypes, devices, modes and options.

    It is made once, and found again for later calls. Options count by equality, or by identity.

    Args:
        make: Called with query, key and value without values, and with the options. Its result must
            depend on nothing else but whether deterministic algorithms are required.
        query: Query of the call.
        key: Key of the call.
        value: Value of the call.
        options: Options of the call. Equal values of different types are different options.

    Returns:
        The result, or ``None`` if the call must be checked in full: a tensor is not plain, autocast
        or a transform is active, an option is a tensor or not hashable, or ``make`` has raised or
        returned ``None``.
    """
    if forward_ad._current_level >= 0 or torch._C._is_any_autocast_enabled():
        return None
    for tensor in (query, key, value):
        if not (
            type(tensor) is Tensor
            and (tensor.is_cpu or tensor.is_cuda)
            and tensor.layout is torch.strided
            and not (
                tensor.is_nested
                or tensor._is_zerotensor()
                or tensor.is_neg()
                or is_functorch_wrapped_tensor(tensor)
            )
        ):
            return None
    for option in options:
        if hasattr(option, "dtype"):  # a tensor or an array, whose values may change
            return None
    sizes, dtypes = (query.shape, key.shape, value.shape), (query.dtype, key.dtype, value.dtype)
    devices, are_recorded = (query.device, key.device, value.device), (False,) * 3
    if torch.is_grad_enabled():
        are_recorded = query.requires_grad, key.requires_grad, value.requires_grad
    modes = torch.are_deterministic_algorithms_enabled(), are_recorded
    try:
        result: _Result | None = _make_once(make, sizes, dtypes, devices, *modes, *options)
        return result
    except Exception:  # the checks of the call raise it
        return None


@lru_cache(maxsize=64, typed=True)
def _make_once(
    make: Callable[..., Any],
    sizes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    is_deterministic: bool,
    are_recorded: tuple[bool, ...],
    *options: Any,
) -> Any:
    """Make the value of a kind of call from tensors without memory; runs once for each kind."""
    stand_ins = (
        torch.empty((), dtype=dtype, device=device).expand(size).requires_grad_(is_recorded)
        for size, dtype, device, is_recorded in zip(
            sizes, dtypes, devices, are_recorded, strict=True
        )
    )
    return make(*stand_ins, *options)
