"""What ranks run under a limit of memory, with the bytes that they hold."""

import re
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from programs import check_tracks_exact, largest_error

from cqs.executors.distributed import prepared
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.distributed.streamed_task import StreamedTask, _Sums
from cqs.partial import RunningMerge
from cqs.scheduler import AttentionShape
from cqs.scheduler.token_order import Flow, held_bytes
from cqs.worker import Worker
from cqs.worker.memory import record_cpu_memory

SCRATCH = [
    (Worker, "run_together"),
    (Worker, "run_backward"),
    (RunningMerge, "add_own"),
    (RunningMerge, "finish"),
    (_Sums, "add"),
]
"""Functions of whose memory only the tensors count that they return. PyTorch converts a half
precision tensor on the CPU before it adds it to a float32 sum."""
BEGIN, END = 1_000_003, 1_000_033
"""Bytes of tensors that mark the beginning and the end of such a function among allocations."""


class PassBytes(NamedTuple):
    """Bytes that a pass of a task held, and those that the cost model predicts, if it does."""

    measured: int
    predicted: int | None


def measure_passes(compute):
    """Run a function; return its result and the bytes held in each pass of a task.

    Outputs, LSEs and gradients of the shard are not counted, nor is the memory of
    the functions in ``SCRATCH``, except the tensors that a worker returns.
    """
    passes, returned = [], []

    def marked(function, *arguments, **options):
        torch.empty(BEGIN, dtype=torch.uint8)
        found = function(*arguments, **options)
        is_new = function.__qualname__.startswith("Worker")
        if is_new:  # without the rows to which a kernel of the CPU pads few queries
            found = type(found)(*(each.clone() if is_part(each) else each for each in found))
        returned.append(sum(tensor.nbytes for tensor in found) if is_new else 0)
        torch.empty(END, dtype=torch.uint8)
        return found

    def measured(function, is_forward, task, *arguments, **options):
        found, samples = record_cpu_memory(partial(function, task, *arguments, **options))
        results = found[0] if is_forward else found
        of_shard = sum(tensor.nbytes for tensor in results)
        held, peak, depth, of_functions = 0, 0, 0, iter(returned)
        for (_, before), (_, after) in pairwise(samples):
            change = after - before
            depth += (change == BEGIN) - (change == END)
            if change == END:
                held += next(of_functions)
            elif abs(change) not in (BEGIN, END) and not depth:
                held += change
            peak = max(peak, held)
        returned.clear()
        predicted = None
        if isinstance(task, StreamedTask):
            problem, *others = arguments
            query, value = (
                (problem.query, problem.value) if is_forward else (others[0][0], others[0][2])
            )
            batch, num_heads, _, head_dim = query.shape
            shape = AttentionShape(
                num_heads, head_dim, batch, value_dim=value.shape[3], itemsize=query.itemsize
            )
            predicted = predicted_bytes(task, shape, is_backward=not is_forward)
        passes.append(PassBytes(peak - of_shard, predicted))
        return found

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in SCRATCH:
            patch.setattr(owner, name, _method(marked, getattr(owner, name)))
        for owner in (RankTask, StreamedTask):
            patch.setattr(owner, "attend", _method(measured, owner.attend, True))
            patch.setattr(owner, "differentiate", _method(measured, owner.differentiate, False))
        return compute(), passes


def is_part(tensor):
    """Return whether the memory of a tensor is larger than the tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _method(wrapper, function, *given):
    def method(*arguments, **options):
        return wrapper(function, *given, *arguments, **options)

    return method


def errors_and_bytes(group, problems):
    """Return the largest error of every problem, and the bytes that its passes hold."""
    return [measure_passes(partial(largest_error, group, *problem)) for problem in problems]


def smallest_limits(group, problems):
    """Return the smallest limit of every problem, which the error of too small a limit gives."""
    return [
        smallest_limit(partial(largest_error, group, case, cuts), options)
        for case, cuts, options in problems
    ]


def smallest_limit(compute, options):
    try:
        compute(options | {"max_bytes": 1})
    except ValueError as error:
        return int(re.search(r"max_bytes must be at least (\d+) .*, got 1$", str(error))[1])
    return 1


def predicted_bytes(task, shape, *, is_backward):
    """Return the bytes that the cost model predicts for a pass of a streamed task."""
    layout = task.layout
    (of_queries, of_keys, _), *_ = (chunk.heads for chunk in layout.chunks)
    shape = replace(shape, num_heads=len(of_queries[0]), num_kv_heads=len(of_keys[0]))
    batches = [
        (flow_of(batch.route), [flow_of(part.route) for part in batch.parts])
        for batch in task.batches
    ]
    shard = len(layout.queries), len(layout.keys)
    groups = len({*of_queries}), len({*of_keys})
    return held_bytes(shape, task.resident, batches, shard, groups, is_backward=is_backward)


def flow_of(route):
    own = route.receives[route.rank]
    return Flow(sum(route.receives), sum(route.lengths) - own, own, route.is_local)


def bytes_within(group, case, cuts, factors, *arguments):
    """Check results against float64, and return limits and the bytes that the passes hold."""

    def compute(options):
        check_tracks_exact(group, case, cuts, options, *arguments)

    least = smallest_limit(compute, {})
    return [
        (factor * least, measure_passes(partial(compute, {"max_bytes": factor * least}))[1])
        for factor in factors
    ]


def within_free_memory(group, case, cuts, free):
    """Return error and bytes of a call without a limit, if so much memory is free."""
    make_placement = prepared._Placement.of.__func__

    def limited(*arguments):
        return replace(make_placement(*arguments), limit=free)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_prepared", weakref.WeakKeyDictionary())
        patch.setattr(prepared._Placement, "of", classmethod(limited))
        return measure_passes(partial(largest_error, group, case, cuts, {}))
