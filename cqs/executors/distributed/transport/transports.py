"""Choice of the transport for a process group: peer-to-peer copies or messages."""

import socket
import zlib
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cqs.executors.distributed.agreement import control_group, swap
from cqs.executors.distributed.transport import cuda_driver
from cqs.executors.distributed.transport.exchange import MessageTransport, Transport
from cqs.worker.cuda_graphs import check_not_captured

if TYPE_CHECKING:
    from cqs.executors.distributed.transport.peer_memory import PeerMemory

_peers: "WeakKeyDictionary[Any, PeerMemory | None]" = WeakKeyDictionary()
"""Peer memory of each process group on GPUs; ``None`` if P2P access is not available."""
_hosts: "WeakKeyDictionary[Any, list[int]]" = WeakKeyDictionary()
"""For each process group, the host number of every rank."""


def transport_of(group: Any, device: torch.device) -> Transport:
    """Return the transport of a process group; every rank must call this.

    GPUs of one host use P2P copies if all pairs support them; all other ranks send messages.

    Args:
        group: The process group; ``None`` means the default group.
        device: Device of this rank's tensors.

    Raises:
        RuntimeError: A rank has failed, or the first call on a group is captured in a CUDA graph.
    """
    group = group or dist.group.WORLD
    if device.type != "cuda":
        return MessageTransport(group)
    if group not in _peers:
        check_not_captured(device)
        _peers[group] = _connect(group, device)
    return _peers[group] or MessageTransport(group)


def ranks_per_host(group: Any) -> int:
    """Return the fewest consecutive ranks that share a host; every rank must call this."""
    return min(len(list(ranks)) for _, ranks in groupby(hosts_of(group or dist.group.WORLD)))


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
