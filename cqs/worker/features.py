"""The table of features by backend, from the attributes of the backends."""

from collections.abc import Callable

from cqs.worker.backend import Backend, CallBackend
from cqs.worker.backends import BACKENDS


def _has_term(name: str) -> Callable[[Backend], bool]:
    return lambda backend: name in backend.supported_terms


FEATURES: dict[str, Callable[[Backend], bool]] = {
    "calls without a score function": lambda backend: not backend.required_terms,
    "sparse patterns": lambda backend: backend.supports_patterns,
    "dropout": lambda backend: backend.supports_dropout,
    "`Scores(sinks=)`": lambda backend: True,  # all partial outputs are merged first
    "`Scores(softcap=)`": _has_term("softcap"),
    "`Scores(alibi_slopes=)`": _has_term("alibi_slopes"),
    "`Scores(bias=)`": _has_term("bias"),
    "gradient of a bias": _has_term("gradient of bias"),
    "`Scores(score_mod=)`": _has_term("score_mod"),
    "gradients of what a score function reads": _has_term("gradient of score_mod"),
    "a task in one launch": lambda backend: not isinstance(backend, CallBackend),
}
"""Feature -> whether a backend supports it."""


def feature_table() -> list[list[str]]:
    """Return the rows of the table: a header, then ``yes`` or ``no`` for each backend."""
    rows = [
        [name, *("yes" if supports(backend) else "no" for backend in BACKENDS.values())]
        for name, supports in FEATURES.items()
    ]
    return [["feature", *(f"`{name}`" for name in BACKENDS)], *rows]
