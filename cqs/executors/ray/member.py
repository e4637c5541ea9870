"""An actor as a rank: it keeps shards of sequences, and computes together with other actors."""

import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.distributed.transports import release
from cqs.executors.ray.blob import Blob
from cqs.executors.ray.session import find_private_folder, import_ray
from cqs.executors.ray.shard_producer import ShardProducer

Shapes = tuple[tuple[int, ...], ...]
"""Those of the tensors of a shard."""
Address = str | tuple[str, int]
"""Path of a file store, or host and port of a TCP store."""

_CONNECT_SECONDS = 10.0
"""In which a store is reached that was opened before."""
_POLL_SECONDS = 0.01
_RELEASE_SECONDS = 2.0
"""In which a GPU gets done with what it waited for."""


class Member:
    """Keeps shards on one device, and is a rank of a torch.distributed group.

    Groups are numbered by generation. Nothing that a broken one computed may be used: a receive
    through NCCL that is aborted returns garbage as if nothing had happened, as does a fetch that is
    released.

    When a call returns, its GPU may still be at work, but not on anything older.
    """

    def __init__(self, device: torch.device):
        """Hold nothing and be in no group."""
        self._device = device
        self._shards: dict[int, tuple[Tensor, ...]] = {}
        self._generation: int | None = None
        self._aborted = -1
        """Latest group that was aborted, which this process may not have joined yet."""
        self._made: torch.cuda.Event | None = None
        """When the GPU is done with what was made last."""
        self._leaving = threading.Lock()

    def bind(self, timeout: float) -> Address:
        """Open the store for the rendezvous of a group.

        Returns:
            The path of a file in the directory of a private cluster, which other users cannot
            enter; in other clusters host and port of a TCP store, which has no authentication and
            listens only on the address that Ray uses on this host.
        """
        if folder := find_private_folder():
            handle, path = tempfile.mkstemp(prefix="rendezvous-", dir=folder)
            os.close(handle)
            return path
        host = import_ray().util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return host, port

    def join(
        self,
        generation: int,
        rank: int,
        num_ranks: int,
        address: Address,
        timeout: float,
        call_timeout: float,
    ) -> None:
        """Leave the group that this process is in, if any, and meet the ranks of another.

        Args:
            generation: Number of the group, never used before.
            rank: Of this process; rank 0 has opened the store.
            num_ranks: Size of the group.
            address: The store's, as returned by :meth:`bind`.
            timeout: Seconds for meeting.
            call_timeout: Seconds after which a collective fails by itself.
        """
        self._leave()
        timeout = min(timeout, call_timeout)
        seconds = timedelta(seconds=min(timeout, _CONNECT_SECONDS))
        if isinstance(address, str):
            opened: dist.Store = dist.FileStore(address, num_ranks)
        else:
            opened = self._store if rank == 0 else dist.TCPStore(*address, timeout=seconds)
        opened.set_timeout(timedelta(seconds=timeout))
        store = dist.PrefixStore(f"{generation}/", opened)
        self._meet(store, generation, rank, num_ranks, time.monotonic() + timeout)
        if interface := _interface_of(import_ray().util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the driver aborts; PyTorch would exit
        # PyTorch names groups by counting them, those too that never came to be; names must agree.
        dist.distributed_c10d._world.group_count = 0
        gpu = torch.device("cuda", torch.cuda.current_device()) if self._is_on_gpu else None
        dist.init_process_group(
            "gloo" if gpu is None else "nccl",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=call_timeout),
            device_id=gpu,
        )
        self._generation = generation

    def _meet(
        self, store: dist.Store, generation: int, rank: int, num_ranks: int, end: float
    ) -> None:
        """Wait until all ranks have come to the store of a group, or some time of the clock.

        PyTorch would wait for one that has died, and could not be told to stop.
        """
        names = [f"has come/{each}" for each in range(num_ranks)]
        store.set(names[rank], "")
        while not store.check(names):
            if self._aborted >= generation or time.monotonic() > end:
                raise RuntimeError("not all ranks have come to meet")
            time.sleep(_POLL_SECONDS)

    def abort(self, generation: int) -> None:
        """Break a group, so that a call which waits for its other ranks ends if it can.

        Called on a thread of its own. Does nothing if this process has gone on to another group.
        """
        self._aborted = generation
        if generation == self._generation:
            self._leave()

    def compute(
        self,
        number: int,
        pickled: bytes,
        place: tuple[int, int],
        sources: tuple[int, ...],
        keep: bool,
        *blobs: Blob,
    ) -> Shapes:
        """Make a shard, and keep it if asked to; return the shapes of its tensors.

        Waits until the GPU is done with the one before: see :meth:`settle`.

        Args:
            number: Of the sharded sequence.
            pickled: The producer, which is given rank, number of ranks and tensors.
            place: Rank and number of ranks.
            sources: Sequences whose shards on this rank the producer is given.
            keep: False if the shard is here already and only other ranks need theirs.
            blobs: Tensors that it is given after them, copied to the device.
        """
        producer: ShardProducer = pickle.loads(pickled)
        generation = self._generation
        tensors = [tensor for source in sources for tensor in self._shards[source]]
        tensors += [blob.tensor().to(self._device, copy=True) for blob in blobs]
        try:
            with torch.no_grad():
                shard = self._as_shard(producer.name, producer(*place, *tensors))
            made = torch.cuda.current_stream().record_event() if self._is_on_gpu else None
            self.settle()
            self._made = made
            if producer.is_collective and self._generation != generation:
                raise RuntimeError(f"generation {generation} of the group was aborted")
        except BaseException:
            if producer.is_collective:
                self._leave()  # other ranks may wait for this one: their connections close
            raise
        if keep:
            self._shards[number] = shard
        return tuple(tuple(tensor.shape) for tensor in shard)

    def settle(self) -> None:
        """Wait until the GPU is done with what was made last.

        It is right if all ranks of its group get there.
        """
        if self._made is not None:
            self._made.synchronize()

    def fetch(self, number: int) -> tuple[Blob, ...]:
        """Return the tensors of a shard."""
        return tuple(map(Blob, self._shards[number]))

    def free(self, numbers: Iterable[int]) -> None:
        """Let go of shards, whether they are here or not."""
        for number in numbers:
            self._shards.pop(number, None)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _as_shard(self, name: str, found: Any) -> tuple[Tensor, ...]:
        several = found if isinstance(found, (tuple, list)) else (found,)
        if not several:
            raise TypeError(f"the function of {name} must return a tensor or several, got none")
        for tensor in several:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"the function of {name} must return a tensor or several, "
                    f"got {type(tensor).__name__}"
                )
        return tuple(tensor.detach().to(self._device) for tensor in several)

    def _leave(self) -> None:
        with self._leaving:
            self._generation = None
            if dist.is_initialized():
                release(dist.group.WORLD, _RELEASE_SECONDS)
                dist.distributed_c10d._abort_process_group()


def _interface_of(host: str) -> str | None:
    """Name the network interface that has an IPv4 address, or return None."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # has no such address
                found = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    return None
