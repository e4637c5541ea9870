"""The options that :func:`cqs.attention` shares with the functions of all other executors."""

from typing import TypedDict, cast

from cqs.patterns import Pattern
from cqs.problem.scores import Scores


class ProblemOptions(TypedDict, total=False):
    """The options of an attention call that define its result."""

    is_causal: bool
    """Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``, counted over the
    whole sequence; ``False`` by default."""
    pattern: Pattern | None
    """Sparse pattern of :mod:`cqs.patterns` over the whole sequence, the query-key pairs that
    attend; ``None`` means all. With ``is_causal`` it is intersected with the causal mask."""
    scale: float | None
    """Factor on the scores; ``None`` means ``head_dim ** -0.5``."""
    dropout_p: float
    """Probability, in [0, 1), that an attention weight is zeroed after the softmax; the others are
    divided by ``1 - dropout_p``. The dropout mask is a function of seed, batch, head and positions,
    the same on every executor."""
    seed: int | None
    """Random seed of the dropout mask, in [0, 2^63). ``None`` draws one from PyTorch's CPU
    generator for each call; ranks take that of rank 0."""
    scores: Scores | None
    """Sinks, soft cap, ALiBi, bias or a score function; see :class:`cqs.Scores`."""
    num_tasks: int | None
    """Number of tasks, any positive integer. ``None`` means 24 with ``reproducible``, otherwise one
    on one device and one for each worker of a cluster. If a GPU has too little memory for so large
    tasks, there are more, which the logger ``cqs`` reports at level INFO. Ranks, streams and
    sharded sequences support a number only with ``reproducible``."""
    reproducible: bool
    """Whether output, LSE and gradients are bitwise identical on every executor, for any number of
    processes, shards, threads and failures, on one model of device with equal versions; ``False``
    by default. They depend on ``num_tasks``; see docs/exactness.md."""


class AttentionOptions(ProblemOptions, total=False):
    """The options of an attention call on any executor."""

    backend: str | None
    """``"cpu"``, ``"triton"``, ``"flash"``, ``"cudnn"``, ``"flex"`` or ``"reference"``; ``None``
    selects the first of :data:`cqs.worker.backends.BACKENDS` that supports the call. A named
    backend never falls back to another; it raises."""
    return_lse: bool
    """Whether to return the log-sum-exp as well; ``False`` by default."""
    verify: bool
    """Whether to recompute sampled rows in float64 and raise an error if they deviate; ``False`` by
    default."""


def problem_options(options: AttentionOptions) -> ProblemOptions:
    """Return the given options that define the result of a call."""
    names = ProblemOptions.__annotations__
    return cast("ProblemOptions", {name: value for name, value in options.items() if name in names})
