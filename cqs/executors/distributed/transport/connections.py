"""What connects the ranks of a group: hosts, the transport between them, and their links."""

import math
import socket
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cqs.executors.distributed.agreement import control_group, swap
from cqs.executors.distributed.transport import cuda_driver
from cqs.executors.distributed.transport.exchange import MessageTransport, Transport
from cqs.worker.cuda_graphs import check_not_captured

if TYPE_CHECKING:
    from cqs.executors.distributed.transport.peer_memory import PeerMemory

_STEPS_PER_OCTAVE = 16
"""Rates are rounded to powers of ``2 ** (1 / _STEPS_PER_OCTAVE)``."""
_NUM_ROUND_TRIPS = 5
"""Round trips of a message of each size, of which the shortest counts."""
_FIRST_BYTES, _MOST_BYTES = 2**16, 2**23
"""Size of the message that estimates the bandwidth, and the largest that measures it."""
_SECONDS = 0.2
"""Duration of the message that measures the bandwidth, by the estimate. Its second half counts:
links with a limited rate let the first bytes pass faster."""
_measured: "WeakKeyDictionary[Any, Links]" = WeakKeyDictionary()
_peers: "WeakKeyDictionary[Any, PeerMemory | None]" = WeakKeyDictionary()
"""Peer memory of each process group on GPUs; ``None`` if P2P access is not available."""
_hosts: "WeakKeyDictionary[Any, list[int]]" = WeakKeyDictionary()
"""For each process group, the host number of every rank."""


def transport_of(group: Any, device: torch.device) -> Transport:
    """Return the transport of a process group; every rank must call this.

    GPUs of one host use P2P copies if all pairs support them; all other ranks send messages.

    Args:
        group: The process group.
        device: Device of this rank's tensors.

    Raises:
        RuntimeError: A rank has failed, or the first call on a group is captured in a CUDA graph.
    """
    if device.type != "cuda":
        return MessageTransport(group)
    if group not in _peers:
        check_not_captured(device)
        _peers[group] = _connect(group, device)
    return _peers[group] or MessageTransport(group)


def ranks_per_host(group: Any) -> int:
    """Return the fewest consecutive ranks that share a host; every rank must call this."""
    return min(len(list(ranks)) for _, ranks in groupby(hosts_of(group)))


def release(group: Any, seconds: float) -> None:
    """Release the streams that wait for other ranks, for at most ``seconds``, after an abort."""
    if (peers := _peers.get(group)) is not None:
        peers.release(seconds)


def _connect(group: Any, device: torch.device) -> "PeerMemory | None":
    """Connect the GPUs for P2P copies, or else open all connections of NCCL."""
    # Collectives first, so that all ranks take the same branch: one without
    # CUDA's driver, or on another host, makes all of them send messages.
    has_driver = swap(control_group(group), [cuda_driver.is_available()])
    if all(has_driver) and len(set(hosts_of(group))) == 1:
        from cqs.executors.distributed.transport.peer_memory import connect_peers

        if (peers := connect_peers(group, device)) is not None:
            return peers
    # Connects all ranks at once: later messages involve only some of them.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return None


def hosts_of(group: Any) -> list[int]:
    """Return a number of each rank's host; every rank must call this."""
    if group not in _hosts:
        _hosts[group] = swap(control_group(group), [_host()])
    return _hosts[group]


def _host() -> int:
    """Return a number that identifies this host since its last boot."""
    started = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (started.read_text() if started.exists() else "")
    return zlib.crc32(name.encode())


class Links(NamedTuple):
    """Bandwidth and latency of the links between devices."""

    bandwidth: float
    """Bytes per second of a device and direction."""
    latency: float
    """Seconds of an exchange."""

    @classmethod
    def check(cls, links: Iterable[float]) -> "Links":
        """Return the links, or raise TypeError or ValueError."""
        try:
            checked = cls(*map(float, links))
        except (TypeError, ValueError) as error:
            raise TypeError(f"links must be (bandwidth, latency), got {links!r}") from error
        if not (0 < checked.bandwidth < math.inf and 0 <= checked.latency < math.inf):
            raise ValueError(f"links must be positive and finite, got {links!r}")
        return checked


def probe_links(group: Any, device: torch.device) -> Links:
    """Return the links of a group between hosts or, on one host, within it, as rank 0 measures.

    Every rank must call this. The first call on a group measures messages between rank 0 and the
    first rank of another host, or rank 1; the ranks of a host share its link. Later calls return
    the same numbers. They are rounded, so that groups with the same links mostly choose the same
    plans.

    Args:
        group: The process group.
        device: Device of this rank's tensors.

    Raises:
        RuntimeError: A rank has failed, or the first call on a group is captured in a CUDA graph.
    """
    if group not in _measured:
        check_not_captured(device)
        steps, num_ranks, rank = [0, 0], dist.get_world_size(group), dist.get_rank(group)
        if num_ranks > 1:
            hosts, per_host = hosts_of(group), ranks_per_host(group)
            other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
            sharing = per_host if hosts[other] != hosts[0] else 1
            if rank in (0, other):
                links = _measure(group, device, other - rank, sharing)
                steps = [round(_STEPS_PER_OCTAVE * math.log2(rate)) for rate in links]
        rank_steps = swap(control_group(group), steps)[: len(steps)]
        _measured[group] = Links(*(2 ** (step / _STEPS_PER_OCTAVE) for step in rank_steps))
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
    """Return the links to a rank that calls this too; ``sharing`` ranks use them at once."""

    def seconds(num_bytes: int) -> float:
        return min(_round_trip(group, device, other, num_bytes) for _ in range(_NUM_ROUND_TRIPS))

    latency = seconds(1) / 2
    enough = int(_FIRST_BYTES * _SECONDS / (seconds(_FIRST_BYTES) / 2))
    size = torch.tensor([min(max(enough, _FIRST_BYTES), _MOST_BYTES)], device=device)
    if dist.get_rank(group) < other:
        dist.send(size, group=group, group_dst=other)
    else:
        dist.recv(size, group=group, group_src=other)
    num_bytes = int(size.item())
    whole, half = seconds(num_bytes) / 2, seconds(num_bytes // 2) / 2
    bandwidth = (num_bytes - num_bytes // 2) / max(whole - half, whole / 4, 1e-9)
    return Links(bandwidth / sharing, max(latency, 1e-9))


def _round_trip(group: Any, device: torch.device, other: int, num_bytes: int) -> float:
    """Return the seconds of a message from the lower rank to the other, and back."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    start = perf_counter()
    if dist.get_rank(group) < other:
        dist.send(message, group=group, group_dst=other)
        dist.recv(message, group=group, group_src=other)
    else:
        dist.recv(message, group=group, group_src=other)
        dist.send(message, group=group, group_dst=other)
    message[0].item()  # waits for a GPU
    return perf_counter() - start
