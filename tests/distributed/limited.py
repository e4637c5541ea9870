"""What ranks run under a limit of memory, with the bytes that they hold."""

import re
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from programs import check_tracks_exact, largest_error

from cqs.executors.distributed import bounded, prepared
from cqs.executors.distributed.batches import CutPlan
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.distributed.streamed_task import StreamedTask, _Sums
from cqs.partial import RunningMerge
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


class Measured(NamedTuple):
    """What a function returns, and the memory of the passes in it."""

    result: Any
    held: int
    """Most bytes that a pass of a task held on this rank."""
    predicted: int | None
    """Most bytes that any rank holds with the order of tokens that was chosen, if one was."""


def measure(compute):
    """Run a function with passes of a task.

    Outputs, LSEs and gradients of the shard are not counted, nor is the memory of
    the functions in ``SCRATCH``, except the tensors that a worker returns.
    """
    passes, returned, predicted = [], [], []

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
        passes.append(peak - of_shard)
        return found

    def noted(function, *arguments, **options):
        predicted.append(function(*arguments, **options))
        return predicted[-1]

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in SCRATCH:
            patch.setattr(owner, name, _method(marked, getattr(owner, name)))
        for owner in (RankTask, StreamedTask):
            patch.setattr(owner, "attend", _method(measured, owner.attend, True))
            patch.setattr(owner, "differentiate", _method(measured, owner.differentiate, False))
        patch.setattr(CutPlan, "most_bytes", _method(noted, CutPlan.most_bytes))
        bounded._choose.cache_clear()
        result = compute()
        return Measured(result, max(passes), predicted[-1] if predicted else None)


def is_part(tensor):
    """Return whether the memory of a tensor is larger than the tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _method(wrapper, function, *given):
    def method(*arguments, **options):
        return wrapper(function, *given, *arguments, **options)

    return method


def errors_and_bytes(group, problems):
    """Return the largest error of every problem, and the bytes that its passes hold."""
    return [measure(partial(largest_error, group, *problem)) for problem in problems]


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


def bytes_within(group, case, cuts, factors, *arguments):
    """Check results against float64, and return limits and the bytes that the passes hold."""

    def compute(options):
        check_tracks_exact(group, case, cuts, options, *arguments)

    least = smallest_limit(compute, {})
    limits = [factor * least for factor in factors]
    return [(limit, measure(partial(compute, {"max_bytes": limit}))) for limit in limits]


def within_free_memory(group, case, cuts, free):
    """Return error and bytes of a call without a limit, if so much memory is free."""
    make_placement = prepared._Placement.of.__func__

    def limited(*arguments):
        return replace(make_placement(*arguments), limit=free)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "_prepared", weakref.WeakKeyDictionary())
        patch.setattr(prepared._Placement, "of", classmethod(limited))
        return measure(partial(largest_error, group, case, cuts, {}))
