"""Problems on the CPU that are one call of a kernel, and that are known from an earlier call.

Checks, plan and choice of a backend depend on sizes, dtypes and options alone. They take 0.1 ms,
as long as the kernel takes for a hundred tokens, so they are done once for each of these.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cqs.executors.contract import Planned
from cqs.executors.local import find_single_call
from cqs.executors.observe import is_observed
from cqs.partial import Partial
from cqs.patterns import Pattern
from cqs.problem import check_problem
from cqs.worker import CallBackend
from cqs.worker.calls import attend_call
from cqs.worker.operands import Operands


class CallOptions(NamedTuple):
    """Arguments of :func:`cqs.attention` that are the same in many calls."""

    is_causal: bool
    scale: float | None
    pattern: Pattern | None
    enable_gqa: bool
    backend: str | None

    @property
    def are_plain(self) -> bool:
        """Whether equal options are the same options: ``1`` equals ``True``, but is no bool."""
        return (
            type(self.is_causal) is type(self.enable_gqa) is bool
            and (self.scale is None or type(self.scale) is float)
            and (self.pattern is None or isinstance(self.pattern, Pattern))
        )


def attend_known(tensors: tuple[Tensor, Tensor, Tensor], options: CallOptions) -> Partial | None:
    """Compute a problem whose call is known, without gradients.

    Args:
        tensors: Query, key and value as the caller gave them.
        options: The other arguments.

    Returns:
        Output and LSE, or ``None`` if all checks must be made, several calls are needed, or
        gradients, autocast, transforms or observers are active.
    """
    if not all(map(_is_plain, tensors)) or not options.are_plain:
        return None
    if forward_ad._current_level >= 0 or torch.is_autocast_enabled("cpu") or is_observed():
        return None
    sizes = tuple([tensor.shape for tensor in tensors])
    found = _find_call(sizes, tuple([tensor.dtype for tensor in tensors]), options)
    if found is None:
        return None
    backend, operands = found
    query, key, value = tensors
    return attend_call(backend, operands._replace(query=query, key=key, value=value))


def _is_plain(tensor: Any) -> bool:
    """Return whether the memory of a CPU tensor has its values, and no gradient is recorded."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.is_cpu
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not (tensor.is_nested or tensor.is_neg() or tensor._is_zerotensor())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@lru_cache(maxsize=64)
def _find_call(
    sizes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], options: CallOptions
) -> tuple[CallBackend, Operands] | None:
    """Return the backend and the operands of the only call, with tensors of one element.

    Raises:
        Exception: An argument is wrong; see :func:`cqs.attention`.
    """
    like = (torch.zeros((), dtype=dtype, device="cpu") for dtype in dtypes)
    tensors = [each.expand(size) for each, size in zip(like, sizes, strict=True)]
    query, key, value = tensors
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
    if is_changed or problem.differs_by_head or not query.numel():
        return None
    return find_single_call(Planned(problem, problem.make_plan(1), backend))
