"""Time of the parts of a layer's step: attention, feed-forward, communication and the rest."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import cqs.executors.distributed.agreement
import cqs.executors.distributed.transport.exchange
from benchmarks.clock import Clock
from cqs.nn import HybridTransformerBlock
from cqs.report.timing import make_busy

PARTS = ("attention", "feed-forward", "communication", "rest")
Intervals = Sequence[tuple[float, float]]


def time_parts(
    layer: HybridTransformerBlock, step: Callable[..., Any], repeats: int
) -> dict[str, float]:
    """Return the seconds of each part: the mean over ranks of the median over repeats."""
    device = next(layer.parameters()).device
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(repeats):
        clock = Clock(device.type, PARTS)
        with _marked(layer, clock):
            dist.barrier()
            clock.enter("rest")
            step(enter=clock.enter)
            for part, seconds in clock.stop().items():
                found[part].append(seconds)
    medians = torch.tensor(
        list(map(statistics.median, found.values())), dtype=torch.float64, device=device
    )
    dist.all_reduce(medians)
    return dict(zip(PARTS, (medians / dist.get_world_size()).tolist(), strict=True))


def time_communication(step: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of communication of a step, and how many of them it overlaps.

    Both are means over the ranks, by PyTorch's profiler. Communication with NCCL includes the time
    in which its kernels wait for other ranks.

    Args:
        step: The computation of one step on this rank.

    Returns:
        ``travels_ms``, the time of communication, and ``hidden_ms``, the part of it in which the
        GPU also computes.
    """
    signal = torch.zeros(1, device="cuda")
    warm_up = make_busy(lambda: dist.all_reduce(signal))
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        warm_up()
        step()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    begun = min(end for name, _, end in events if "nccl" in name)  # of the warm-up
    communicating, computing = [], []
    for name, start, end in events:
        if start >= begun:
            if "PtoP" in name or "nccl" in name:
                communicating.append((start, end))
            elif not name.startswith("Mem"):
                computing.append((start, end))
    communication, overlapped = measure_overlap(communicating, computing)
    found = torch.tensor([communication, overlapped], device="cuda")
    dist.all_reduce(found)
    communication, overlapped = (found / dist.get_world_size()).tolist()
    return {"travels_ms": communication, "hidden_ms": overlapped}


def measure_overlap(some: Intervals, others: Intervals) -> tuple[float, float]:
    """Return the length of a union of intervals, and the length of its overlap with others.

    Example:
        >>> measure_overlap([(0, 3), (2, 4), (6, 7)], [(3, 5), (6.5, 9)])
        (5.0, 1.5)
    """
    of_some = _union(some)
    return of_some, of_some + _union(others) - _union([*some, *others])


def _union(times: Intervals) -> float:
    """Return the length of a union of intervals."""
    length, end = 0.0, -math.inf
    for start, stop in sorted(times):
        length += max(stop - max(start, end), 0)
        end = max(end, stop)
    return length


class _Waits(TorchDispatchMode):
    """Attributes waits for collectives of DTensors to communication."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # dispatched again for the plain tensors within
        if func is torch.ops._c10d_functional.wait_tensor.default:
            func = self.clock.attributed(func, "communication")
        return func(*args, **kwargs or {})


@contextmanager
def _marked(layer: HybridTransformerBlock, clock: Clock) -> Iterator[None]:
    """Make a layer report its parts, and waits for other ranks, forward and backward."""
    waiting = (
        (cqs.executors.distributed.transport.exchange.Transfer, "wait"),
        (cqs.executors.distributed.agreement.GroupCalls, "compare"),
    )
    with ExitStack() as stack:
        for owner, name in waiting:
            marked = clock.attributed(getattr(owner, name), "communication")
            stack.enter_context(patch.object(owner, name, marked))
        for module, part in ((layer.attention, "attention"), (layer.feed_forward, "feed-forward")):

            def begin(*_: Any, part: str = part) -> None:
                clock.enter(part)

            def end(*_: Any) -> None:
                clock.enter("rest")

            for handle in (
                module.register_forward_pre_hook(begin),
                module.register_forward_hook(end),
                module.register_full_backward_pre_hook(begin),
                module.register_full_backward_hook(end),
            ):
                stack.callback(handle.remove)
        stack.enter_context(_Waits(clock))
        yield
