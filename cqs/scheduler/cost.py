"""Predict FLOPs, traffic and peak memory of a task from its token ranges."""

from dataclasses import dataclass, fields

from cqs.arguments import as_integer
from cqs.ranges import contains
from cqs.scheduler.task import Step, Task

_LSE_ITEMSIZE = 4
"""Bytes of an LSE: float32. For float64 inputs the LSE is float64, see ``sum_itemsize``."""
_QUERY_WORDS, _KEY_WORD = 16, 8
"""Bytes of random state that dropout stores per query (of each head) and per key."""
_MERGED_BY_A_KERNEL = ("cudnn", "flash")
"""GPU backends whose merge kernel needs no float32 copy of the partial outputs."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape and element size of the attention tensors, without the sequence lengths."""

    num_heads: int
    """Number of query heads."""
    head_dim: int
    """Head dimension of queries and keys."""
    batch: int = 1
    num_kv_heads: int | None = None
    """Number of KV heads; ``None`` means ``num_heads``."""
    value_dim: int | None = None
    """Head dimension of values and outputs; ``None`` means ``head_dim``."""
    itemsize: int = 2
    """Bytes per element of query, key, value and output: 2 for float16 and bfloat16."""
    has_dropout: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless ``batch`` is at least 0 and the rest at least 1."""
        for field in fields(self):
            number = getattr(self, field.name)
            if number is not None and field.name != "has_dropout":
                number = as_integer(field.name, number, least=int(field.name != "batch"))
                object.__setattr__(self, field.name, number)

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def value_columns(self) -> int:
        """Head dimension of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def sum_itemsize(self) -> int:
        """Bytes per element of accumulators and of the LSE: 4, or 8 for float64 inputs."""
        return max(_LSE_ITEMSIZE, self.itemsize)

    @property
    def sums_apart(self) -> bool:
        """Whether accumulators have a wider dtype than the tensors."""
        return self.itemsize < _LSE_ITEMSIZE

    def query_bytes(self, num_queries: int) -> int:
        """Return the bytes of ``num_queries`` query tokens, over all heads and the batch."""
        return self.batch * self.num_heads * num_queries * self.head_dim * self.itemsize

    def key_bytes(self, num_keys: int) -> int:
        """Return the bytes of the keys and values of ``num_keys`` tokens."""
        columns = self.head_dim + self.value_columns
        return self.batch * self.kv_heads * num_keys * columns * self.itemsize

    def result_bytes(self, num_queries: int) -> int:
        """Return the bytes of the output and LSE of ``num_queries`` query tokens."""
        row_bytes = self.value_columns * self.itemsize + self.sum_itemsize
        return self.batch * self.num_heads * num_queries * row_bytes


@dataclass(frozen=True)
class TaskCost:
    """Predicted cost of one task's forward pass."""

    flops: int
    """Multiplications and additions of the two matrix products over live pairs."""
    bytes_in: int
    """Bytes of the queries, keys and values that the task receives."""
    bytes_out: int
    """Bytes of the partial outputs and LSEs that the task returns."""
    peak_bytes: int
    """Peak memory in bytes: inputs, partial outputs, and buffers of the backend. Scratch memory
    inside kernels is not counted. The buffers depend on the backend:

    - ``triton``: none, except the random state of dropout.
    - Backends that compute one step at a time: the gathered keys and values of a step or, if
      larger, the two partial outputs that merge a rectangle with its causal square.
    - ``reference``: also scores, weights and converted values.
    - Any backend with a pattern: the output in float32, and the buffers of the kernel calls that
      the backend splits the task into.
    """


def predict_cost(
    task: Task,
    shape: AttentionShape,
    backend: str | None = None,
    *,
    pattern_bytes: int | None = None,
) -> TaskCost:
    """Predict FLOPs, traffic and peak memory of ``task`` for tensors of the given ``shape``.

    FLOPs count ``2 * (head_dim + value_dim)`` per live pair, head and batch element. For dense
    non-causal attention this is the usual ``4 * N * N * d``.

    Args:
        task: The task to predict.
        shape: Heads, head dimensions, batch and element size of the tensors.
        backend: Name of the backend, such as ``"triton"``. ``None`` assumes a backend that
            computes one step at a time.
        pattern_bytes: For a task of a plan with a pattern, the bytes that the backend holds besides
            inputs, see :func:`cqs.worker.memory.predict_pattern_cost`; 0 counts results alone.

    Returns:
        The predicted cost of the forward pass.

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
    if pattern_bytes is None:
        peak_beyond_inputs = _dense_bytes(task, shape, backend)
    else:
        peak_beyond_inputs = max(pattern_bytes, bytes_out)
    if shape.has_dropout and (pattern_bytes is not None or backend == "triton"):
        peak_beyond_inputs += width * _QUERY_WORDS * num_queries + _KEY_WORD * num_keys
    return TaskCost(
        flops=2 * (shape.head_dim + shape.value_columns) * width * task.live_pairs,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        peak_bytes=bytes_in + peak_beyond_inputs,
    )


def _dense_bytes(task: Task, shape: AttentionShape, backend: str | None) -> int:
    """Return the peak bytes of a task without a pattern, excluding its inputs."""
    has_sums = shape.sums_apart and backend not in _MERGED_BY_A_KERNEL
    row_sums = shape.batch * shape.num_heads * shape.value_columns * _LSE_ITEMSIZE * has_sums
    returned = peak = 0
    for step in task.steps:
        results = shape.result_bytes(len(step.queries))
        returned += results
        # Keys of several held ranges are copied together.
        is_held = len(step.keys) == 1 and any(contains(held, *step.keys) for held in task.held_keys)
        gathered = 0 if is_held else shape.key_bytes(sum(map(len, step.keys)))
        sums = row_sums * len(step.queries)
        merged = 2 * (results + sums) if step.keys and step.causal_keys else 0
        if backend == "reference":
            gathered += _reference_bytes(step, shape)
        beside = 0 if backend == "triton" else max(gathered, merged)
        peak = max(peak, returned + beside)
    return peak


def _reference_bytes(step: Step, shape: AttentionShape) -> int:
    """Return the bytes that the reference allocates in the larger of a step's two calls.

    Scores, weights and output are in the accumulation dtype, and so are values that must be
    converted or repeated for each query head. Dropout adds a boolean mask, and its inverse until
    the output is allocated.
    """
    num_queries = len(step.queries)
    num_keys = max(sum(map(len, step.keys)), len(step.causal_keys or ()))
    pairs = shape.num_heads * num_queries * num_keys
    value_heads = shape.kv_heads * shape.sums_apart
    value_heads += shape.num_heads * (shape.num_heads > shape.kv_heads)
    converted = (shape.num_heads * num_queries + value_heads * num_keys) * shape.value_columns
    mask = pairs if shape.has_dropout else 0
    return shape.batch * (
        2 * pairs * shape.sum_itemsize + mask + max(mask, converted * shape.sum_itemsize)
    )
