"""An actor as a rank: it holds shards of sequences, and computes together with other actors."""

import os
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.executors.distributed.transport.connections import Links, pin_links, release
from cqs.executors.ray.blob import Blob
from cqs.executors.ray.session import find_private_folder, import_ray
from cqs.executors.ray.shards.operation import Address, Shapes, ShardProducer

_CONNECT_SECONDS = 10.0
"""Seconds for the connection to a store, which rank 0 has opened before."""
_POLL_SECONDS = 0.01
"""Seconds between two checks of the rendezvous."""
_RELEASE_SECONDS = 2.0
"""Seconds in which a GPU must leave its waits for peers before the process group is aborted."""


class ShardActor:
    """Holds shards on one device, and is a rank of a torch.distributed process group.

    Groups are numbered by generation. Results of an aborted group are invalid and must be
    discarded: an aborted NCCL receive, or a released wait for a peer, leaves arbitrary data in its
    buffer and raises no error.

    When a call returns, the GPU may still execute its kernels, but no kernels of earlier calls.
    """

    def __init__(self, device: torch.device):
        """Start without shards and without a process group."""
        self._device = device
        self._shards: dict[int, tuple[Tensor, ...]] = {}
        self._generation: int | None = None
        self._aborted = -1
        """Last generation that was aborted; this process may not have joined it yet."""
        self._made: torch.cuda.Event | None = None
        """Recorded after the kernels of the last shard."""
        self._leaving = threading.Lock()

    def bind(self, timeout: float) -> Address:
        """Open the store for the rendezvous of a group; the driver calls this on rank 0.

        Args:
            timeout: Timeout of a TCP store, in seconds.

        Returns:
            In a private Ray, the path of a file in a directory that other users cannot enter. On
            other clusters, host and port of a TCP store. It has no authentication, and listens only
            on the address that Ray uses on this host.
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
        place: tuple[int, int],
        address: Address,
        timeouts: tuple[float, float],
        links: Links | None,
    ) -> Links | None:
        """Leave the current process group, if any, and join a new one.

        Args:
            generation: Number of the group, greater than those of earlier groups.
            place: Rank of this process, and number of ranks.
            address: Address of the store that rank 0 has opened.
            timeouts: Seconds for the rendezvous, and after which a collective fails.
            links: Links that earlier groups used, so that repeated calls choose the same plans.

        Returns:
            The links between hosts that the group uses; ``None`` on one host.

        Raises:
            RuntimeError: The rendezvous timed out or was aborted.
        """
        rank, num_ranks = place
        self._leave()
        timeout, call_timeout = min(timeouts), timeouts[1]
        seconds = timedelta(seconds=min(timeout, _CONNECT_SECONDS))
        if isinstance(address, str):
            opened: dist.Store = dist.FileStore(address, num_ranks)
        else:
            opened = self._store if rank == 0 else dist.TCPStore(*address, timeout=seconds)
        opened.set_timeout(timedelta(seconds=timeout))
        store = dist.PrefixStore(f"{generation}/", opened)
        names = [f"joined/{peer}" for peer in range(num_ranks)]
        store.set(names[rank], "")
        end = time.monotonic() + timeout
        while not store.check(names):  # PyTorch's own wait for a failed rank cannot be aborted
            if self._aborted >= generation or time.monotonic() > end:
                missing = [peer for peer in range(num_ranks) if not store.check([names[peer]])]
                raise RuntimeError(
                    f"rendezvous of rank {rank} was aborted or timed out: ranks {missing} did not "
                    "join"
                )
            time.sleep(_POLL_SECONDS)
        _choose_interface(is_private=isinstance(address, str))
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else PyTorch ends the process
        # PyTorch names groups by a counter that includes failed groups; ranks must agree on it.
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
        return pin_links(dist.group.WORLD, links, gpu or torch.device("cpu"))

    def abort(self, generation: int) -> None:
        """Abort a process group, so that calls that wait for its other ranks end.

        Runs on another thread than these calls. Does nothing if this process has joined a later
        group.
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
        """Make a shard, and return the shapes of its tensors.

        Waits until the GPU has finished the previous shard; see :meth:`settle`.

        Args:
            number: Sequence number of the shard operation.
            pickled: The pickled producer.
            place: Rank of this actor, and number of ranks.
            sources: Numbers of the operations whose shards on this rank are inputs of the producer.
            keep: Store the shard. False if this rank already holds it and only takes part in a
                collective call for other ranks.
            blobs: Additional inputs of the producer, which are copied to the device.

        Raises:
            TypeError: The producer did not return tensors.
            RuntimeError: The process group was aborted during the call.
            Exception: The producer raised.
        """
        producer: ShardProducer = pickle.loads(pickled)
        generation = self._generation
        tensors = [tensor for source in sources for tensor in self._shards[source]]
        tensors += [blob.tensor().to(self._device, copy=True) for blob in blobs]
        try:
            with torch.no_grad():
                shard = self._as_shard(producer, producer.function(*place, *tensors))
            made = torch.cuda.current_stream().record_event() if self._is_on_gpu else None
            self.settle()
            self._made = made
            if producer.is_collective and self._generation != generation:
                raise RuntimeError(f"generation {generation} of the group was aborted")
        except BaseException:
            if producer.is_collective:
                self._leave()  # closes the connections of ranks that wait for this one
            raise
        if keep:
            self._shards[number] = shard
        return tuple(tuple(tensor.shape) for tensor in shard)

    def settle(self) -> None:
        """Block until the GPU has finished the shard that :meth:`compute` made last.

        The driver calls this on all actors of a group: the shard is valid if all calls return. On
        a CPU it returns at once.

        Raises:
            RuntimeError: A kernel of the shard failed.
        """
        if self._made is not None:
            self._made.synchronize()

    def fetch(self, number: int) -> tuple[Blob, ...]:
        """Return the tensors of a shard as blobs."""
        return tuple(map(Blob, self._shards[number]))

    def free(self, numbers: Iterable[int]) -> None:
        """Free the shards of some operations; ignore operations without a shard here."""
        for number in numbers:
            self._shards.pop(number, None)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _as_shard(self, producer: ShardProducer, returned: Any) -> tuple[Tensor, ...]:
        """Return the result of a producer's function as tensors on the device."""
        several = returned if isinstance(returned, (tuple, list)) else (returned,)
        wrong = [type(value).__name__ for value in several if not isinstance(value, Tensor)]
        if wrong or not several:
            raise TypeError(
                f"the function of {producer.name} must return a tensor or several, got "
                f"{wrong[0] if wrong else 'none'}"
            )
        return tuple(tensor.detach().to(self._device) for tensor in several)

    def _leave(self) -> None:
        with self._leaving:
            self._generation = None
            if dist.is_initialized():
                release(dist.group.WORLD, _RELEASE_SECONDS)
                dist.distributed_c10d._abort_process_group()


def _choose_interface(is_private: bool) -> None:
    """Let gloo and NCCL listen where Ray does, unless the environment of another Ray says where."""
    if is_private:
        os.environ.pop("NCCL_COMM_ID", None)  # an address, which takes precedence
    if interface := _interface_of(import_ray().util.get_node_ip_address()):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if is_private or name not in os.environ:
                os.environ[name] = interface


def _interface_of(host: str) -> str | None:
    """Return the name of the network interface with an IP address; None if there is none."""
    import psutil  # comes with Ray

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == host for entry in addresses):
            return str(name)
    return None
