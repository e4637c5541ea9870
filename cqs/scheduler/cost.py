"""What a task costs: arithmetic, traffic and memory, from its ranges alone."""

from dataclasses import dataclass, fields

from cqs.scheduler.arguments import as_integer
from cqs.scheduler.task import Step, Task

_LSE_ITEMSIZE = 4
"""The log of the softmax denominator travels as float32 (float64 for float64 inputs)."""
_QUERY_WORDS, _KEY_WORD = 16, 8
"""Bytes from which dropout draws the lots of a query's pairs, and of a key's."""
_MERGED_BY_A_KERNEL = ("cudnn", "flash")
"""Backends of GPUs, where partial results merge without a float32 copy."""


@dataclass(frozen=True)
class AttentionShape:
    """Everything about the tensors that a cost depends on, besides their lengths."""

    num_heads: int
    head_dim: int
    batch: int = 1
    num_kv_heads: int | None = None
    """``None``: as many as ``num_heads``."""
    value_dim: int | None = None
    """``None``: ``head_dim``."""
    itemsize: int = 2
    """Bytes per element of query, key, value and output: 2 for float16 and bfloat16."""
    has_dropout: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless all are integers of at least 1, batch 0."""
        for field in fields(self):
            if field.name == "has_dropout":
                continue
            if (number := getattr(self, field.name)) is not None:
                number = as_integer(field.name, number, least=int(field.name != "batch"))
                object.__setattr__(self, field.name, number)


@dataclass(frozen=True)
class TaskCost:
    """Prediction for one task's forward pass."""

    flops: int
    """Multiplications and additions of the two matrix products over live pairs."""
    bytes_in: int
    """Queries, keys and values that the worker must receive."""
    bytes_out: int
    """Partial outputs and their lse that the worker returns."""
    peak_bytes: int
    """Most bytes held at once, without a kernel's own scratch: inputs, results, and what the
    backend needs besides. ``triton``: nothing, but for the words of dropout. Backends that compute
    a step at a time: its gathered keys and values or, if that is more, the two partial results
    that merge where a causal square joins a rectangle. ``reference``: also the scores, the weights
    and what it converts."""


def predict_cost(task: Task, shape: AttentionShape, backend: str | None = None) -> TaskCost:
    """Predict what ``task`` costs with tensors of the given ``shape``.

    ``backend`` is the name of the one that computes; ``None`` stands for a library's.

    FLOPs count ``2 * (head_dim + value_dim)`` per live pair, head and batch element, the usual
    ``4 * N * N * d`` of full attention.

    Example:
        >>> from cqs.scheduler import make_plan
        >>> cost = predict_cost(make_plan(7000, num_workers=7).task(0), AttentionShape(8, 64))
        >>> cost.flops == 4 * 7 * 1000 * 1000 * 64 * 8, cost.bytes_in == 3 * 3000 * 8 * 64 * 2
        (True, True)
    """
    num_kv_heads = shape.num_heads if shape.num_kv_heads is None else shape.num_kv_heads
    value_dim = shape.head_dim if shape.value_dim is None else shape.value_dim
    width = shape.batch * shape.num_heads
    query_bytes = width * shape.head_dim * shape.itemsize
    key_bytes = shape.batch * num_kv_heads * (shape.head_dim + value_dim) * shape.itemsize
    row_bytes = width * (value_dim * shape.itemsize + max(_LSE_ITEMSIZE, shape.itemsize))
    sums_apart = shape.itemsize < _LSE_ITEMSIZE and backend not in _MERGED_BY_A_KERNEL
    sum_bytes = width * value_dim * _LSE_ITEMSIZE if sums_apart else 0

    bytes_in = query_bytes * sum(map(len, task.held_queries))
    bytes_in += key_bytes * sum(map(len, task.held_keys))
    bytes_out = peak_beyond_inputs = 0
    for step in task.steps:
        bytes_out += row_bytes * len(step.queries)
        gathered = key_bytes * sum(map(len, step.keys)) if _must_gather(step, task) else 0
        merged = 2 * (row_bytes + sum_bytes) * len(step.queries) if step.is_split else 0
        beside = 0 if backend == "triton" else max(gathered, merged)
        if backend == "reference":
            beside = max(gathered + _reference_bytes(step, shape), merged)
        peak_beyond_inputs = max(peak_beyond_inputs, bytes_out + beside)
    if shape.has_dropout and backend == "triton":
        peak_beyond_inputs += width * _QUERY_WORDS * sum(map(len, task.held_queries))
        peak_beyond_inputs += _KEY_WORD * sum(map(len, task.held_keys))
    return TaskCost(
        flops=2 * (shape.head_dim + value_dim) * width * task.live_pairs,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        peak_bytes=bytes_in + peak_beyond_inputs,
    )


def _reference_bytes(step: Step, shape: AttentionShape) -> int:
    """Return what the reference holds beside its arguments and results in its larger call.

    All in the accumulation dtype: scores and weights, the output, and the values if they must be
    converted or repeated for each query head. Dropout adds a boolean mask, and its inverse before
    there is an output.
    """
    num_kv_heads = shape.num_heads if shape.num_kv_heads is None else shape.num_kv_heads
    value_dim = shape.head_dim if shape.value_dim is None else shape.value_dim
    num_queries = len(step.queries)
    num_keys = max(sum(map(len, step.keys)), len(step.causal_keys or ()))
    itemsize = max(_LSE_ITEMSIZE, shape.itemsize)
    pairs = shape.num_heads * num_queries * num_keys
    converted = shape.num_heads * num_queries * value_dim
    if shape.itemsize < _LSE_ITEMSIZE:
        converted += num_kv_heads * num_keys * value_dim
    if shape.num_heads > num_kv_heads:
        converted += shape.num_heads * num_keys * value_dim
    mask = pairs if shape.has_dropout else 0
    return shape.batch * (2 * pairs * itemsize + mask + max(mask, converted * itemsize))


def _must_gather(step: Step, task: Task) -> bool:
    """Say whether the keys of a step lie in more than one of the groups held."""
    if len(step.keys) != 1:
        return bool(step.keys)
    (keys,) = step.keys
    return not any(held.start <= keys.start and keys.stop <= held.stop for held in task.held_keys)
