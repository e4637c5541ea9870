"""What carries rows between the ranks of a group."""

import socket
import zlib
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cqs.cuda_graphs import check_not_captured
from cqs.distributed.agreement import control_group, swap
from cqs.distributed.transfer import MessageTransport, Transport

if TYPE_CHECKING:
    from cqs.distributed.peer_memory import PeerMemory

_peers: "WeakKeyDictionary[Any, PeerMemory | None]" = WeakKeyDictionary()
"""Of groups on GPUs: ``None`` if their ranks do not reach each other's memory."""
_hosts: "WeakKeyDictionary[Any, list[int]]" = WeakKeyDictionary()
"""Of groups: the host of every rank."""


def transport_of(group: Any, device: torch.device) -> Transport:
    """Return what carries rows between the ranks of a group; every rank must call this.

    GPUs of one host fetch from each other's memory; others, and CPUs, send messages.
    """
    group = group or dist.group.WORLD
    if device.type != "cuda":
        return MessageTransport(group)
    if group not in _peers:
        check_not_captured(device)
        _peers[group] = _connect(group, device)
    return _peers[group] or MessageTransport(group)


def ranks_per_host(group: Any) -> int:
    """Return how many ranks in a row are on one host, at least; every rank must call this."""
    return min(len(list(ranks)) for _, ranks in groupby(_hosts_of(group or dist.group.WORLD)))


def count_sends(group: Any) -> int:
    """Return how often this rank has sent: on all ranks as often, unless some failed alone."""
    peers = _peers.get(group or dist.group.WORLD)
    return 0 if peers is None else peers.num_sends


def reset_peak_peer_bytes(group: Any) -> None:
    """Begin anew to look for the most that calls pack for other ranks."""
    if (peers := _peers.get(group or dist.group.WORLD)) is not None:
        peers.peak_bytes = 0


def peak_peer_bytes(group: Any) -> int:
    """Return the most bytes that a call packed for other ranks, which PyTorch does not count."""
    peers = _peers.get(group or dist.group.WORLD)
    return 0 if peers is None else peers.peak_bytes


def release(group: Any, seconds: float) -> None:
    """End what waits on this GPU for other ranks, so that the group can be left."""
    if (peers := _peers.get(group)) is not None:
        peers.release(seconds)


def _connect(group: Any, device: torch.device) -> "PeerMemory | None":
    """Let GPUs reach each other's memory, or else open all connections of NCCL."""
    control = control_group(group)
    found = swap(control, [_has_driver()], [1] * control.size())
    if all(found) and len(set(_hosts_of(group))) == 1:
        from cqs.distributed.peer_memory import connect_peers

        if (peers := connect_peers(group, device)) is not None:
            return peers
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # messages may concern some ranks
    return None


def _hosts_of(group: Any) -> list[int]:
    if group not in _hosts:
        control = control_group(group)
        _hosts[group] = swap(control, [_host()], [1] * control.size())
    return _hosts[group]


def _has_driver() -> bool:
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return False
    return True


def _host() -> int:
    """Return a number of this host, as it has been since it was started."""
    started = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname() + (started.read_text() if started.exists() else "")
    return zlib.crc32(name.encode())
