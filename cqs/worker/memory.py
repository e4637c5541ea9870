"""Peak memory of a computation: measured, and predicted for tasks with a pattern."""

import os
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch._C._profiler import RecordScope
from torch.autograd.profiler import _enable_profiler, profile

from cqs.partial import SUM_BLOCK
from cqs.patterns import BoundPattern
from cqs.scheduler import AttentionShape, Task, TaskCost, predict_cost
from cqs.worker.backend import CallBackend
from cqs.worker.backends import BACKENDS
from cqs.worker.calls import Call, is_one_call, make_calls
from cqs.worker.cpu import padding_rows
from cqs.worker.triton.tiles import make_tile_list, query_launches
from cqs.worker.work import BlockRow, Work, make_work

Result = TypeVar("Result")

_PREDICTED_TILE = 128
"""Rows of a tile and columns of a block that predictions of the Triton backend assume."""
_SHARE_OF_GPU, _SHARE_OF_HOST = 0.9, 0.5
"""Fractions of the free memory that a call may take."""
_LSES_OF_A_MERGE = 6
"""Number of tensors in the shape of an LSE that a merge allocates at once."""


def memory_of(device: torch.device) -> int:
    """Return the memory of a GPU in bytes."""
    return torch.cuda.get_device_properties(device).total_memory


def free_bytes(device: torch.device) -> int:
    """Return 90 % of the free memory of a GPU, or 50 % of the free memory of the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Blocks that PyTorch's allocator caches are free for PyTorch, not for the driver.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((free + cached) * _SHARE_OF_GPU)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available * _SHARE_OF_HOST)


def measure_peak_bytes(compute: Callable[[], Result], device: torch.device) -> tuple[Result, int]:
    """Run a function and return its result and its peak memory in bytes.

    The peak counts the bytes that tensors and PyTorch's kernels request on the device during the
    run, beyond those allocated before. On a GPU it comes from the statistics of PyTorch's
    allocator, whose blocks are up to 1 MiB larger than requests. On the CPU it comes from PyTorch's
    profiler, which takes about a millisecond.

    Args:
        compute: The function to run.
        device: The device whose memory is measured.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = _requested(device, "current")
        result = compute()
        torch.cuda.synchronize(device)
        return result, _requested(device, "peak") - before
    result, samples = record_cpu_memory(compute)
    return result, max(held for _, held in samples)


def _requested(device: torch.device, when: str) -> int:
    statistics = torch.cuda.memory_stats_as_nested_dict(device)  # memory_stats sorts it too
    return int(statistics["requested_bytes"]["all"][when]) if statistics else 0


class _MemoryProfile(profile):
    """PyTorch's profiler without events of operators, which take most of its time.

    It extends torch.autograd's profiler because torch.profiler imports all of torch.compile.
    """

    def _start_trace(self) -> None:
        no_operators = {RecordScope.BUILD_FEATURE}  # an empty set means all scopes
        _enable_profiler(  # type: ignore[call-arg]
            self.config(), self.kineto_activities, no_operators
        )


def record_cpu_memory(compute: Callable[[], Result]) -> tuple[Result, list[tuple[float, int]]]:
    """Run a function and return its result and its CPU memory over time, by PyTorch's profiler.

    Args:
        compute: The function to run.

    Returns:
        The result, and samples: seconds since the start, and the bytes allocated from then on.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it announces every start on stderr otherwise
    with _MemoryProfile(profile_memory=True, use_kineto=True) as profiler:
        start = time.time()
        result = compute()
    assert profiler.kineto_results is not None
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = accumulate(event.nbytes() for event in events)
    times = (event.start_ns() / 1e9 - start for event in events)
    return result, [(0.0, 0), *zip(times, sizes, strict=True)]


def predict_pattern_cost(
    task: Task, shape: AttentionShape, backend: str | None, pattern: BoundPattern | None
) -> TaskCost:
    """Predict the cost of a task, with the buffers of its backend if the plan has a pattern.

    The prediction counts tensors on the device, but not the scratch memory of kernels.

    Args:
        task: The task to predict.
        shape: Sizes and dtype of the tensors.
        backend: Name of the backend; ``None`` counts no buffers of a backend.
        pattern: The pattern of the task's plan, bound to the plan's lengths, or ``None``.
    """
    if pattern is None:
        return predict_cost(task, shape, backend)
    peak = 0
    if backend is not None:
        work = make_work(task.steps, pattern, task.held_queries, task.held_keys)
        chosen = BACKENDS[backend]
        if not isinstance(chosen, CallBackend):
            peak = _launch_bytes(task, work, shape)
        else:
            returned = 0
            calls = make_calls(work, joins_calls=chosen.joins_calls)
            for block_row, row_calls in zip(work.block_rows, calls, strict=True):
                peak = max(peak, returned + _block_row_bytes(block_row, row_calls, shape, chosen))
                returned += shape.result_bytes(len(block_row.queries))
    return predict_cost(task, shape, backend, pattern_bytes=peak)


def _block_row_bytes(
    block_row: BlockRow,
    calls: Sequence[tuple[Call, bool]],
    shape: AttentionShape,
    backend: CallBackend,
) -> int:
    """Return the peak bytes of the calls of a block row, including the result they merge into.

    While a call computes, the result of the call before is still allocated.
    """
    before = peak = 0
    all_rows = shape.batch * shape.num_heads * len(block_row.queries)
    if is_one_call(block_row.queries, calls):
        return _call_bytes(calls[0][0], all_rows, shape, backend.name)[0]
    for call, is_first in calls:
        rows, num_calls = shape.batch * shape.num_heads * len(call.view.queries), 1
        if call.number > 1:
            num_calls = shape.batch * shape.num_heads // shape.kv_heads
            rows = rows // num_calls * call.number
        computing, result = _call_bytes(call, rows, shape, backend.name)
        peak, before = max(peak, before + computing), result
        if not is_first:
            sums, lse = rows * shape.value_columns * shape.sum_itemsize, rows * shape.sum_itemsize
            converted = sums * shape.sums_apart
            peak = max(peak, result + converted + sums + _LSES_OF_A_MERGE * lse)
            before = sums + lse
        if num_calls > 1:
            peak = max(peak, before + computing)
    if shape.sums_apart:
        peak = max(peak, all_rows * shape.value_columns * shape.itemsize)
    return all_rows * (shape.value_columns + 1) * shape.sum_itemsize + peak


def _call_bytes(call: Call, rows: int, shape: AttentionShape, backend: str) -> tuple[int, int]:
    """Return the peak bytes of a call, excluding its arguments, and the bytes of its results.

    Args:
        call: A call of :func:`make_calls`.
        rows: Number of query rows of all heads and views that it computes at once.
        shape: Sizes and dtype of the tensors.
        backend: Name of a backend that computes one call at a time.
    """
    num_keys = len(call.view.keys)
    area = len(call.view.queries) * num_keys
    has_mask = not (call.is_causal or call.view.is_full)
    output, lse = rows * shape.value_columns * shape.itemsize, rows * shape.sum_itemsize
    result = output + lse
    if backend != "reference":  # the additive mask, and buffers of the kernel
        mask = (1 + shape.itemsize) * area * has_mask
        if num_padding := padding_rows(len(call.view.queries)):  # a copy, and its output
            padded_rows = rows + rows // len(call.view.queries) * num_padding
            mask += 2 * padded_rows * shape.head_dim * shape.itemsize
        return mask + result + lse * has_mask, result

    size, width = shape.sum_itemsize, shape.batch * shape.kv_heads
    is_repeated = 1 < width < shape.batch * shape.num_heads  # a single one need not be copied
    key_rows = num_keys * (shape.batch * shape.num_heads * is_repeated + width * shape.sums_apart)
    scores = rows * num_keys * size
    sums = rows * shape.value_columns * size
    scoring = (rows * (1 + shape.sums_apart) + key_rows) * shape.head_dim * size + scores
    scoring += area * max(2 * call.is_causal, has_mask)
    dropout_mask = rows * num_keys * shape.has_dropout
    converted, added = key_rows * shape.value_columns * size, sums * (num_keys > SUM_BLOCK)
    weighing = 2 * scores + lse + max(sums + max(converted, added), dropout_mask)
    return area * has_mask + dropout_mask + max(
        scoring, weighing, sums * shape.sums_apart + result
    ), result


def _launch_bytes(task: Task, work: Work, shape: AttentionShape) -> int:
    """Return the peak bytes of the launches of a task: lists, results, their merge and copies.

    There is one launch for each pair of steps. A launch copies the tensors of a side whose number
    of rows is not a multiple of the step.
    """
    launches = query_launches(work, packed=True)
    num_rows = sum(len(block_row.queries) for block_row in work.block_rows)
    answer, part = 0, shape.result_bytes(num_rows)
    if len(launches) > 1:
        rows = shape.batch * shape.num_heads * num_rows
        answer, part = part, rows * (shape.value_columns + 1) * shape.sum_itemsize
    lists = peak = 0
    for number, launch in enumerate(launches, 1):
        tile_list = make_tile_list(launch, _PREDICTED_TILE, _PREDICTED_TILE)
        lists += tile_list.tiles.nbytes + tile_list.runs.nbytes + launch.mask_bits.nbytes
        copied = sum(
            bytes_of(rows + -rows % step)
            for bytes_of, ranges, step in (
                (shape.query_bytes, task.held_queries, launch.steps.row),
                (shape.key_bytes, task.held_keys, launch.steps.column),
            )
            if (rows := sum(map(len, ranges))) % step
        )
        peak = max(peak, answer + number * part + copied)
    return lists + peak
