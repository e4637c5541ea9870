"""Streaming runs that stop, and outputs in files, for several tests of streaming."""

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import cqs


class Stop(Exception):
    """Raised by a progress function to end a run."""


def stop_after(number):
    """Return a progress function that raises :class:`Stop` in its call of this number."""
    calls = itertools.count(1)

    def progress(done, total):
        assert 0 < done <= total
        if next(calls) == number:
            raise Stop

    return progress


def new_output(shape, path="out.npy"):
    return np.lib.format.open_memmap(path, "w+", np.float32, shape)


def go_on_after(number, tensors, sources, out, budgets, **options):
    """Stop a run after some blocks, and go on; return the share of the pairs at which it goes on.

    Args:
        number: Number of blocks until the run stops.
        tensors: Query, key and value in memory, whose results are those bit by bit.
        sources: The same query, key and value as the run reads them.
        out: Output in a file, beside which the run has its directory.
        budgets: Memory of the run until it stops, and afterwards.
        **options: Other arguments of the calls.
    """
    attend = partial(cqs.streaming.attention, device="cpu", return_lse=True, **options)
    whole, whole_lse = attend(*tensors, memory_budget=budgets[0])
    target = cqs.streaming.Resumable(out, Path(out.filename).with_name("run"))
    run, seen = partial(attend, *sources, out=target), []
    with pytest.raises(Stop):
        run(memory_budget=budgets[0], progress=stop_after(number))
    _, lse = run(memory_budget=budgets[1], progress=lambda *done: seen.append(done))
    assert np.array_equal(out, whole) and torch.equal(lse, whole_lse)
    assert seen[-1][0] == seen[-1][1]
    return seen[0][0] / seen[-1][1]
