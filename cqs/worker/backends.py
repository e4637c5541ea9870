"""Which kernel computes a call: the one named, or the best that says nothing against it."""

from collections.abc import Callable

from torch import Tensor

from cqs.partial import Partial
from cqs.worker.cpu import attend_cpu, gradients_cpu, why_not_cpu
from cqs.worker.cudnn import attend_cudnn, gradients_cudnn, why_not_cudnn
from cqs.worker.reference import attend_reference, gradients_reference, why_not_reference
from cqs.worker.triton import add_gradients, attend_rectangles, why_not_triton

WHY_NOT: dict[str, Callable[[Tensor, Tensor, Tensor], str | None]] = {
    "cpu": why_not_cpu,
    "triton": why_not_triton,
    "cudnn": why_not_cudnn,
    "reference": why_not_reference,
}
"""Backend name -> the reason why it must decline ``(query, key, value)``, or None; best first."""

ATTEND: dict[str, Callable[..., Partial]] = {
    "cudnn": attend_cudnn,
    "cpu": attend_cpu,
    "reference": attend_reference,
}
"""Backends that take one rectangle, or one causal square, at a time."""

GRADIENTS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "cudnn": gradients_cudnn,
    "cpu": gradients_cpu,
    "reference": gradients_reference,
}
"""Their backward passes."""

ATTEND_RECTANGLES: dict[str, Callable[..., list[Partial]]] = {"triton": attend_rectangles}
"""Backends that take whole tasks."""

ADD_GRADIENTS: dict[str, Callable[..., None]] = {"triton": add_gradients}
"""Their backward passes."""


def check_backend_name(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is None or the name of a backend."""
    if backend is not None and backend not in list(WHY_NOT):
        raise ValueError(f"backend must be one of {list(WHY_NOT)} or None, got {backend!r}")


def choose_backend(query: Tensor, key: Tensor, value: Tensor, backend: str | None = None) -> str:
    """Return the backend to use: the one named, or the first that accepts the tensors.

    Raises:
        ValueError: if ``backend`` names none.
        NotImplementedError: if the named backend declines; the message says why.
    """
    check_backend_name(backend)
    if backend is None:
        return next(name for name, why_not in WHY_NOT.items() if not why_not(query, key, value))
    if reason := WHY_NOT[backend](query, key, value):
        raise NotImplementedError(f"backend {backend!r} {reason}")
    return backend
