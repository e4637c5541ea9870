"""Which kernel computes a call: the one named, or the best that says nothing against it."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from cqs.partial import Partial
from cqs.worker.cpu import attend_cpu, gradients_cpu, why_not_cpu
from cqs.worker.cudnn import attend_cudnn, gradients_cudnn, why_not_cudnn
from cqs.worker.flash import attend_flash, gradients_flash, why_not_flash
from cqs.worker.reference import attend_reference, gradients_reference, why_not_reference
from cqs.worker.triton import attend_shares, gradients_of_shares, why_not_triton

WHY_NOT: dict[str, Callable[[Tensor, Tensor, Tensor], str | None]] = {
    "cpu": why_not_cpu,
    "triton": why_not_triton,
    "flash": why_not_flash,
    "cudnn": why_not_cudnn,
    "reference": why_not_reference,
}
"""Backend name -> the reason why it must decline ``(query, key, value)``, or None.

The best comes first, but for work that is a single call: there ``flash`` is, where it is installed.
One H200, bfloat16, 16 heads, 16,384 tokens, TFLOP/s full / causal:

=========  ================  =================  ===============  ================
..         forward, d = 128  backward, d = 128  forward, d = 64  backward, d = 64
=========  ================  =================  ===============  ================
flash      668 / 623         604 / 534          504 / 456        556 / 520
triton     627 / 590         413 / 438          433 / 396        323 / 323
cudnn      621 / 578         539 / 520          445 / 400        447 / 439
=========  ================  =================  ===============  ================

Tasks of several calls go to ``triton``: it computes them in one launch, without gathering keys or
merging within a task, and returns float32. The backward pass of ``cudnn`` is never the default: it
adds in any order.
"""

ATTEND: dict[str, Callable[..., Partial]] = {
    "flash": attend_flash,
    "cudnn": attend_cudnn,
    "cpu": attend_cpu,
    "reference": attend_reference,
}
"""Backends that take one rectangle, or one causal square, at a time."""

GRADIENTS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "flash": gradients_flash,
    "cudnn": gradients_cudnn,
    "cpu": gradients_cpu,
    "reference": gradients_reference,
}
"""Their backward passes."""

ATTEND_SHARES: dict[str, Callable[..., Partial]] = {"triton": attend_shares}
"""Backends that take whole tasks."""

GRADIENTS_OF_SHARES: dict[str, Callable[..., Sequence[Tensor]]] = {"triton": gradients_of_shares}
"""Their backward passes."""

BEST_FOR_WHOLE_CALLS = ("flash", *(name for name in WHY_NOT if name != "flash"))
"""Names of backends for work that is a single call, best first."""

BEST_FOR_CALLS = tuple(name for name in BEST_FOR_WHOLE_CALLS if name in ATTEND)
"""Those for one call among several."""

IN_BATCHES = ("cpu",)
"""Backends of single calls that want calls of one shape joined."""

_WITH_DROPOUT = ("triton", "reference")
_WITH_PATTERN = ("cpu", "triton", "reference")


def check_backend_name(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is None or the name of a backend."""
    if backend is not None and backend not in list(WHY_NOT):
        raise ValueError(f"backend must be one of {list(WHY_NOT)} or None, got {backend!r}")


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backend: str | None = None,
    *,
    has_dropout: bool = False,
    has_pattern: bool = False,
    best_first: Iterable[str] = WHY_NOT,
) -> str:
    """Return the backend to use: the one named, or the best that accepts the tensors.

    Raises:
        ValueError: if ``backend`` names none.
        NotImplementedError: if the named backend declines; the message says why, and why the
            others do or that they would not.
    """
    check_backend_name(backend)

    def why_not(name: str) -> str | None:
        if has_dropout and name not in _WITH_DROPOUT:
            return "cannot drop out"
        if has_pattern and name not in _WITH_PATTERN:
            return "cannot hide what a pattern hides"
        return WHY_NOT[name](query, key, value)

    for name in [backend] if backend else best_first:
        if not why_not(name):
            return name
    reasons = {name: why_not(name) for name in WHY_NOT}
    declined = f"backend {backend!r} {reasons.pop(str(backend))}"
    others = (f"{name!r} {reason or 'would do'}" for name, reason in reasons.items())
    raise NotImplementedError("; ".join([declined, *others]))
