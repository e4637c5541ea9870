"""Counters in GPU memory, by which the programs of a launch take their items."""

import torch
import triton
from torch import Tensor

from cqs.worker.cuda_graphs import outside_of_graphs

_NUM_COUNTERS = 256
"""Number of counters that are filled at once."""
_counters: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Counters that no launch has used, by device and stream."""


def new_counter(device: torch.device) -> Tensor:
    """Return int32 zeros on the device, to count the items that programs took and started.

    To fill them takes the host as long as the launch itself, so those of many launches are filled
    at once. They belong to the current stream, which runs the launch after the filling.
    """
    shape = _NUM_COUNTERS, 4  # 16 bytes each, the alignment for which Triton compiles the kernels
    if torch.cuda.is_current_stream_capturing():  # every replay must fill them anew
        return torch.zeros(shape[1], dtype=torch.int32, device=device)
    place = device, triton.runtime.driver.active.get_current_stream(device.index)
    counters = _counters.setdefault(place, [])
    try:
        return counters.pop()
    except IndexError:  # all are used, or another thread was faster
        stream = torch.cuda.current_stream(device)

        def make() -> Tensor:
            with torch.cuda.stream(stream):
                return torch.zeros(shape, dtype=torch.int32, device=device)

        counter, *others = outside_of_graphs(make).unbind()
        counters += others
        return counter
