"""Handles: arrays that stand for Python values in the graphs of ``torch.compile``.

A graph takes tensors. An operator takes a value as a tensor of one number, which it looks up here.
"""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

Handle = NDArray[np.float64]
"""An array of one element, or a tensor with its memory. The memory keeps the value alive."""


class _Memory(bytearray):
    """The memory of a handle, which NumPy and PyTorch free with the last array or tensor on it."""

    value: Any


_memories: "WeakValueDictionary[int, _Memory]" = WeakValueDictionary()
_numbers = count(1)


def new_handle(value: Any) -> Handle:
    """Return a handle of a value.

    Its bits are a number that no other handle has. As a float the number is below 1e-300, so that
    PyTorch's checks of operators, which compare results up to rounding, accept any handle.
    """
    memory, number = _Memory(8), next(_numbers)
    memory.value = value
    _memories[number] = memory
    handle = np.frombuffer(memory, np.int64)
    handle[0] = number
    return handle.view(np.float64)


def read_handle(handle: Handle) -> Any:
    """Return the value of a handle or of a copy of one.

    Raises:
        RuntimeError: Every array and tensor with the memory of the handle has been freed.
    """
    memory = _memories.get(int(handle.view(np.int64)[0]))
    if memory is None:
        raise RuntimeError(
            "a copy of a handle must not outlive it, got one of a freed value: hooks on saved "
            "tensors, such as save_on_cpu(pin_memory=True), must not copy tensors of one element"
        )
    return memory.value
