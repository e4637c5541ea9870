"""Registry of the backends, and the choice of one for a given call."""

from collections.abc import Iterable

from torch import Tensor

from cqs.patterns import BoundPattern, Pattern
from cqs.problem.dropout import Dropout
from cqs.problem.score_terms import ScoreTerms
from cqs.worker.backend import Backend
from cqs.worker.cpu import CPU
from cqs.worker.cudnn import CUDNN
from cqs.worker.flash import FLASH
from cqs.worker.flex import FLEX
from cqs.worker.reference import REFERENCE
from cqs.worker.triton import TRITON

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (CPU, TRITON, FLASH, CUDNN, FLEX, REFERENCE)
}
"""All backends by name.

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

BEST_FOR_WHOLE_CALLS = ("cpu", "flash", "triton", "cudnn", "flex", "reference")
"""Names of all backends in the order of preference for work that is a single call."""


def check_backend_name(backend: str | None) -> None:
    """Raise ValueError unless ``backend`` is None or the name of a backend."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend must be one of {list(BACKENDS)} or None, got {backend!r}")


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backend: str | None = None,
    dropout: Dropout | None = None,
    pattern: Pattern | BoundPattern | None = None,
    terms: ScoreTerms | None = None,
    best_first: Iterable[str] = BACKENDS,
) -> Backend:
    """Return the backend to use for these tensors.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        backend: Name of the only candidate, or None to try ``best_first``.
        dropout: Dropout that the backend must support, or None.
        pattern: Sparse pattern that the backend must support, or None.
        terms: Score terms that the backend must support, or None.
        best_first: Names of the candidates, in the order of preference.

    Raises:
        ValueError: ``backend`` is not the name of a backend.
        NotImplementedError: The named backend does not support the tensors or options. The message
            gives the reason.
    """

    def why_not(candidate: Backend) -> str | None:
        if dropout is not None and not candidate.supports_dropout:
            return "does not support dropout"
        if pattern is not None and not candidate.supports_patterns:
            return "does not support sparse patterns"
        names = frozenset() if terms is None else terms.names
        if lacking := candidate.required_terms - names:
            return f"requires scores with {', '.join(sorted(lacking))}"
        if missing := names - candidate.supported_terms:
            return f"does not support scores with {', '.join(sorted(missing))}"
        return candidate.why_not(query, key, value)

    if backend is not None:
        check_backend_name(backend)
    for name in best_first if backend is None else [backend]:
        reason = why_not(BACKENDS[name])
        if reason is None:
            return BACKENDS[name]
    raise NotImplementedError(
        f"backend {backend!r} {reason}: backend=None chooses one that supports the call"
    )
