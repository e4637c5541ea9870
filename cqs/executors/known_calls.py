"""Problems that are one call of a kernel, and that are known from an earlier call.

Checks, plan and choice of a backend depend on sizes, dtypes, device and options alone. They take
0.1 ms, as long as a CPU takes for a hundred tokens, so they are done once for each of these.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from cqs.executors.contract import Planned
from cqs.executors.local import Attend, find_call
from cqs.executors.observe import is_observed
from cqs.partial import Partial
from cqs.patterns import Pattern
from cqs.problem import check_problem


def attend_known(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    pattern: Pattern | None,
    enable_gqa: bool,
    backend: str | None,
) -> Partial | None:
    """Compute a problem whose call is known, without gradients.

    Arguments are those of :func:`cqs.attention`.

    Returns:
        Output and LSE, or ``None`` if all checks must be made, several calls or more memory are
        needed, or gradients, autocast, transforms, observers or deterministic algorithms are
        active.
    """
    if not (
        _is_plain(query)
        and _is_plain(key)
        and _is_plain(value)
        # Equal options are the same options: 1 equals True, but is no bool.
        and type(is_causal) is type(enable_gqa) is bool
        and (scale is None or type(scale) is float)
        and (pattern is None or isinstance(pattern, Pattern))
    ):
        return None
    if (
        forward_ad._current_level >= 0
        or torch.is_autocast_enabled(query.device.type)
        or torch.are_deterministic_algorithms_enabled()  # this may exclude a backend
        or is_observed()
    ):
        return None
    attend = _find_call(
        (query.shape, key.shape, value.shape),
        (query.dtype, key.dtype, value.dtype),
        (query.device, key.device, value.device),
        (is_causal, scale, pattern, enable_gqa, backend),
    )
    if attend is None:
        return None
    try:
        return attend(query, key, value)
    except torch.OutOfMemoryError:  # the general path raises it with a remedy
        return None


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is dense, on the CPU or a GPU, and records no gradient."""
    return (
        type(tensor) is Tensor
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not (
            tensor.is_nested
            or tensor._is_zerotensor()
            or tensor.is_neg()
            or is_functorch_wrapped_tensor(tensor)
        )
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )


@lru_cache(maxsize=64)
def _find_call(
    sizes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    options: tuple[Any, ...],
) -> Attend | None:
    """Return a function that computes such a problem in one call, or None if several are needed.

    Raises:
        Exception: An argument is wrong; see :func:`cqs.attention`.
    """
    query, key, value = (
        torch.empty((), dtype=dtype, device=device).expand(size)
        for size, dtype, device in zip(sizes, dtypes, devices, strict=True)
    )
    is_causal, scale, pattern, enable_gqa, backend = options
    problem = check_problem(
        query,
        key,
        value,
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    is_changed = (problem.query.shape, problem.key.shape, problem.value.shape) != sizes
    if is_changed or problem.differs_by_head or not query.numel() or not key.numel():
        return None
    return find_call(Planned(problem, problem.make_plan(1), backend))
