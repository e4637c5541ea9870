"""Measurement of the links of a process group."""

import math
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cqs.executors.distributed.agreement import control_group, swap
from cqs.executors.distributed.transport.transports import hosts_of, ranks_per_host
from cqs.scheduler.cost_model import Links
from cqs.worker.cuda_graphs import check_not_captured

_STEPS_PER_OCTAVE = 4
"""Rates are rounded to powers of ``2 ** (1 / _STEPS_PER_OCTAVE)``."""
_NUM_ROUND_TRIPS = 5
"""Round trips of an empty message, of which the shortest counts."""
_SECONDS = 0.05
"""Messages are doubled until a round trip takes so long."""
_MOST_BYTES = 2**26
_measured: "WeakKeyDictionary[Any, Links]" = WeakKeyDictionary()


def probe_links(group: Any, device: torch.device) -> Links:
    """Return the links of a group between hosts or, on one host, within it, as rank 0 measures.

    Every rank must call this. The first call on a group measures messages between rank 0 and the
    first rank of another host, or rank 1; the ranks of a host share its link. Later calls return
    the same numbers. They are rounded, so that groups with the same links mostly choose the same
    plans.

    Args:
        group: The process group; ``None`` means the default group.
        device: Device of this rank's tensors.

    Raises:
        RuntimeError: A rank has failed, or the first call on a group is captured in a CUDA graph.
    """
    group = group or dist.group.WORLD
    if group not in _measured:
        check_not_captured(device)
        steps, num_ranks = [0, 0], dist.get_world_size(group)
        if num_ranks > 1:
            hosts = hosts_of(group)
            other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
            sharing = ranks_per_host(group) if hosts[other] != hosts[0] else 1
            if dist.get_rank(group) == 0:
                steps = [_as_steps(rate) for rate in _measure(group, device, other, sharing)]
            elif dist.get_rank(group) == other:
                _echo(group, device)
        found = swap(control_group(group), steps)[: len(steps)]
        _measured[group] = Links(*(2 ** (step / _STEPS_PER_OCTAVE) for step in found))
    return _measured[group]


def pin_links(group: Any, links: Links | None, device: torch.device) -> Links | None:
    """Make a group use links, or measure them on several hosts; every rank calls this.

    Args:
        group: The process group.
        links: Links that an earlier group of the same ranks used; ``None`` means none.
        device: Device of this rank's tensors.

    Returns:
        The links that the group uses; ``None`` on one host.
    """
    if links is not None:
        _measured[group] = links
    elif ranks_per_host(group) < dist.get_world_size(group):
        links = probe_links(group, device)
    return links


def _measure(group: Any, device: torch.device, other: int, sharing: int) -> Links:
    """Return the links to a rank that calls :func:`_echo`; ``sharing`` ranks use them at once."""
    latency = min(_round_trip(group, device, other, 1) for _ in range(_NUM_ROUND_TRIPS)) / 2
    num_bytes, seconds = 2**16, 0.0
    while seconds < _SECONDS and num_bytes < _MOST_BYTES:
        num_bytes *= 2
        seconds = _round_trip(group, device, other, num_bytes)
    _round_trip(group, device, other, 0)
    return Links(num_bytes / max(seconds / 2 - latency, 1e-9) / sharing, max(latency, 1e-9))


def _round_trip(group: Any, device: torch.device, other: int, num_bytes: int) -> float:
    """Return the seconds of a message to a rank and back; 0 bytes end the measurement."""
    length = torch.tensor([num_bytes], device=device)
    dist.send(length, group=group, group_dst=other)
    message = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    start = perf_counter()
    if num_bytes:
        dist.send(message, group=group, group_dst=other)
        dist.recv(message, group=group, group_src=other)
        message[0].item()  # waits for a GPU
    return perf_counter() - start


def _echo(group: Any, device: torch.device) -> None:
    """Answer the messages of rank 0 until it ends the measurement."""
    length = torch.empty(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(length, group=group, group_src=0)
        if not (num_bytes := int(length.item())):
            return
        message = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        dist.recv(message, group=group, group_src=0)
        dist.send(message, group=group, group_dst=0)


def _as_steps(rate: float) -> int:
    return round(_STEPS_PER_OCTAVE * math.log2(rate))
