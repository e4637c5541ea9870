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
    is_recorded, kinds = torch.is_grad_enabled(), []
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
        requires_grad = is_recorded and tensor.requires_grad
        kinds.append((tensor.shape, tensor.dtype, tensor.device, requires_grad))
    for option in options:
        if hasattr(option, "dtype"):  # a tensor or an array, whose values may change
            return None
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        result: _Result | None = _make_once(make, tuple(kinds), is_deterministic, *options)
        return result
    except Exception:  # the checks of the call raise it
        return None


@lru_cache(maxsize=64, typed=True)
def _make_once(
    make: Callable[..., Any],
    kinds: tuple[tuple[torch.Size, torch.dtype, torch.device, bool], ...],
    is_deterministic: bool,
    *options: Any,
) -> Any:
    """Make the value of a kind of call from tensors without memory; runs once for each kind."""
    stand_ins = (
        torch.empty((), dtype=dtype, device=device).expand(size).requires_grad_(requires_grad)
        for size, dtype, device, requires_grad in kinds
    )
    return make(*stand_ins, *options)
