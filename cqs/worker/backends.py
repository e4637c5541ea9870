"""Registry of the backends, and the choice of one for a given call."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from cqs.partial import Partial
from cqs.worker.cpu import attend_cpu, gradients_cpu, why_not_cpu
from cqs.worker.cudnn import attend_cudnn, gradients_cudnn, why_not_cudnn
from cqs.worker.flash import attend_flash, gradients_flash, why_not_flash
from cqs.worker.reference import attend_reference, gradients_reference, why_not_reference
from cqs.worker.triton import attend_block_rows, gradients_of_block_rows, why_not_triton

WHY_NOT: dict[str, Callable[[Tensor, Tensor, Tensor], str | None]] = {
    "cpu": why_not_cpu,
    "triton": why_not_triton,
    "flash": why_not_flash,
    "cudnn": why_not_cudnn,
    "reference": why_not_reference,
}
"""Backend name -> function of ``(query, key, value)`` that returns the reason why the backend does
not support these tensors, or None if it does.

The order is the order of preference for work of several calls. For a single call ``flash`` is
preferred where it is installed. Throughput in TFLOP/s, non-causal / causal, on one H200 with
bfloat16, 16 heads and 16,384 tokens:

=========  ================  =================  ===============  ================
..         forward, d = 128  backward, d = 128  forward, d = 64  backward, d = 64
=========  ================  =================  ===============  ================
flash      668 / 623         604 / 534          504 / 456        556 / 520
triton     627 / 590         413 / 438          433 / 396        323 / 323
cudnn      621 / 578         539 / 520          445 / 400        447 / 439
=========  ================  =================  ===============  ================

``triton`` computes a task of several calls in one launch. It neither gathers keys nor merges within
a task, and it can return float32. The backward pass of ``cudnn`` is never the default, because it
accumulates in a nondeterministic order.
"""

ATTEND: dict[str, Callable[..., Partial]] = {
    "flash": attend_flash,
    "cudnn": attend_cudnn,
    "cpu": attend_cpu,
    "reference": attend_reference,
}
"""Forward functions of the backends that compute one rectangle or causal square a call."""

GRADIENTS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "flash": gradients_flash,
    "cudnn": gradients_cudnn,
    "cpu": gradients_cpu,
    "reference": gradients_reference,
}
"""Backward functions of the backends in ``ATTEND``."""

ATTEND_BLOCK_ROWS: dict[str, Callable[..., Partial]] = {"triton": attend_block_rows}
"""Forward functions of the backends that compute whole tasks a call."""

GRADIENTS_OF_BLOCK_ROWS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "triton": gradients_of_block_rows
}
"""Backward functions of the backends in ``ATTEND_BLOCK_ROWS``."""

BEST_FOR_WHOLE_CALLS = ("flash", *(name for name in WHY_NOT if name != "flash"))
"""Names of all backends in the order of preference for work that is a single call."""

BEST_FOR_CALLS = tuple(name for name in BEST_FOR_WHOLE_CALLS if name in ATTEND)
"""Names of the backends for one call among several, in the order of preference."""

IN_BATCHES = ("cpu",)
"""Names of the backends for which calls of one shape are joined into a batched call."""

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
    """Return the name of the backend to use for these tensors.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        backend: The only candidate, or None to try ``best_first``.
        has_dropout: Whether the backend must support dropout.
        has_pattern: Whether the backend must support sparse patterns.
        best_first: Names of the candidates, in the order of preference.

    Raises:
        ValueError: ``backend`` is not the name of a backend.
        NotImplementedError: The named backend does not support the tensors or options. The message
            gives the reason for every backend.
    """
    check_backend_name(backend)

    def why_not(name: str) -> str | None:
        if has_dropout and name not in _WITH_DROPOUT:
            return "does not support dropout"
        if has_pattern and name not in _WITH_PATTERN:
            return "does not support sparse patterns"
        return WHY_NOT[name](query, key, value)

    for name in [backend] if backend else best_first:
        if not why_not(name):
            return name
    reasons = {name: why_not(name) for name in WHY_NOT}
    declined = f"backend {backend!r} {reasons.pop(str(backend))}"
    others = (f"{name!r} {reason or 'supports them'}" for name, reason in reasons.items())
    raise NotImplementedError("; ".join([declined, *others]))
