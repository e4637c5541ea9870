"""What a task costs: arithmetic, traffic and memory, from its ranges alone."""

from dataclasses import dataclass, fields
from typing import Any

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

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def value_columns(self) -> int:
        """Columns of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element where sums are formed, and of an lse."""
        return max(_LSE_ITEMSIZE, self.itemsize)

    @property
    def sums_apart(self) -> bool:
        """Whether sums are wider than the tensors."""
        return self.itemsize < _LSE_ITEMSIZE

    def query_bytes(self, num_queries: int) -> int:
        """Return the bytes of so many queries."""
        return self.batch * self.num_heads * num_queries * self.head_dim * self.itemsize

    def key_bytes(self, num_keys: int) -> int:
        """Return the bytes of so many keys and values."""
        columns = self.head_dim + self.value_columns
        return self.batch * self.kv_heads * num_keys * columns * self.itemsize

    def result_bytes(self, num_queries: int) -> int:
        """Return the bytes of outputs and lse of so many queries."""
        row_bytes = self.value_columns * self.itemsize + self.sum_itemsize
        return self.batch * self.num_heads * num_queries * row_bytes


@dataclass(frozen=True)
class TaskCost:
    """Prediction for one task's forward pass."""

    flops: int
    """Multiplications and additions of the two matrix products over live pairs."""
    bytes_in: int
    """Queries, keys and values that the task must receive."""
    bytes_out: int
    """Partial outputs and their lse that the task returns."""
    peak_bytes: int
    """Most bytes held at once, without a kernel's own scratch: inputs, results, and what the
    backend needs besides. ``triton``: nothing, but for the words of dropout. Backends that compute
    a step at a time: its gathered keys and values or, if that is more, the two partial results
    that merge where a causal square joins a rectangle. ``reference``: also the scores, the weights
    and what it converts. With a pattern: the result in float32, and what the calls or launches
    take that it is cut into."""


def predict_cost(
    task: Task, shape: AttentionShape, backend: str | None = None, pattern: Any = None
) -> TaskCost:
    """Predict what ``task`` costs with tensors of the given ``shape``.

    FLOPs count ``2 * (head_dim + value_dim)`` per live pair, head and batch element, the usual
    ``4 * N * N * d`` of full attention.

    Args:
        task: What is computed.
        shape: Of the tensors.
        backend: Name of the one that computes; ``None`` stands for a library's, and with a pattern
            for one that needs nothing beside inputs and results.
        pattern: The one of the task's plan, bound to its lengths. A backend that is named is then
            asked how it would cut the task, which imports torch.

    Example:
        >>> from cqs.scheduler import make_plan
        >>> cost = predict_cost(make_plan(7000, num_tasks=7).task(0), AttentionShape(8, 64))
        >>> cost.flops == 4 * 7 * 1000 * 1000 * 64 * 8, cost.bytes_in == 3 * 3000 * 8 * 64 * 2
        (True, True)
    """
    width = shape.batch * shape.num_heads
    num_queries, num_keys = (sum(map(len, held)) for held in (task.held_queries, task.held_keys))
    bytes_in = shape.query_bytes(num_queries) + shape.key_bytes(num_keys)
    bytes_out = sum(shape.result_bytes(len(step.queries)) for step in task.steps)
    if pattern is None:
        peak_beyond_inputs = _dense_bytes(task, shape, backend)
    elif backend is None:
        peak_beyond_inputs = bytes_out
    else:
        from cqs.worker.memory import predict_sparse_bytes

        peak_beyond_inputs = predict_sparse_bytes(task, pattern, shape, backend)
    if shape.has_dropout and (pattern is not None or backend == "triton"):
        peak_beyond_inputs += width * _QUERY_WORDS * num_queries + _KEY_WORD * num_keys
    return TaskCost(
        flops=2 * (shape.head_dim + shape.value_columns) * width * task.live_pairs,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        peak_bytes=bytes_in + peak_beyond_inputs,
    )


def _dense_bytes(task: Task, shape: AttentionShape, backend: str | None) -> int:
    """Return the most bytes that a task without a pattern holds beside its inputs."""
    sums_apart = shape.sums_apart and backend not in _MERGED_BY_A_KERNEL
    sum_bytes = shape.value_columns * _LSE_ITEMSIZE if sums_apart else 0
    returned = peak = 0
    for step in task.steps:
        results = shape.result_bytes(len(step.queries))
        returned += results
        gathered = shape.key_bytes(sum(map(len, step.keys))) if _must_gather(step, task) else 0
        sums = shape.batch * shape.num_heads * sum_bytes * len(step.queries)
        merged = 2 * (results + sums) if step.is_split else 0
        beside = 0 if backend == "triton" else max(gathered, merged)
        if backend == "reference":
            beside = max(gathered + _reference_bytes(step, shape), merged)
        peak = max(peak, returned + beside)
    return peak


def _reference_bytes(step: Step, shape: AttentionShape) -> int:
    """Return what the reference holds beside its arguments and results in its larger call.

    All in the accumulation dtype: scores and weights, the output, and the values if they must be
    converted or repeated for each query head. Dropout adds a boolean mask, and its inverse before
    there is an output.
    """
    num_queries = len(step.queries)
    num_keys = max(sum(map(len, step.keys)), len(step.causal_keys or ()))
    pairs = shape.num_heads * num_queries * num_keys
    converted = shape.num_heads * num_queries * shape.value_columns
    if shape.sums_apart:
        converted += shape.kv_heads * num_keys * shape.value_columns
    if shape.num_heads > shape.kv_heads:
        converted += shape.num_heads * num_keys * shape.value_columns
    mask = pairs if shape.has_dropout else 0
    return shape.batch * (
        2 * pairs * shape.sum_itemsize + mask + max(mask, converted * shape.sum_itemsize)
    )


def _must_gather(step: Step, task: Task) -> bool:
    """Say whether the keys of a step lie in more than one of the groups held."""
    if len(step.keys) != 1:
        return bool(step.keys)
    (keys,) = step.keys
    return not any(held.start <= keys.start and keys.stop <= held.stop for held in task.held_keys)
