"""Streaming runs that stop, and outputs in files, for several tests of streaming."""

import itertools

import numpy as np


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
