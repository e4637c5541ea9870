"""What runs inside a remote process: a plain class, made remote by the executor."""

import os
import socket
import time
from typing import Any, NamedTuple

import torch

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.report import TaskReport
from cqs.partial import Partial
from cqs.scheduler import Task
from cqs.worker import HeldTokens, Worker
from cqs.worker.memory import measure_peak_bytes


class ActorInfo(NamedTuple):
    """Who an actor is."""

    pid: int
    host: str
    """Processes of equal host can signal each other by pid."""
    device: str


def host_name() -> str:
    """Name this host and its process namespace."""
    namespace = "/proc/self/ns/pid"
    inode = os.stat(namespace).st_ino if os.path.exists(namespace) else 0
    return f"{socket.gethostname()}/{inode}"


class TaskActor:
    """Computes one task at a time on one device."""

    def __init__(self, use_gpu: bool, num_threads: int):
        """Take the GPU that the process was given, if there is one, else ``num_threads`` cores."""
        self._device = torch.device("cuda" if use_gpu and torch.cuda.is_available() else "cpu")
        torch.set_num_threads(num_threads)
        measure_peak_bytes(lambda: torch.ones(1, device=self._device), self._device)  # warm up

    def describe(self) -> ActorInfo:
        """Answer as soon as the actor can work."""
        return ActorInfo(os.getpid(), host_name(), str(self._device))

    def run(
        self, task: Task, scale: float, backend: str | None, *groups: Any
    ) -> tuple[list[tuple[Blob, Blob]], TaskReport]:
        """Compute ``task``.

        Args:
            task: What to compute.
            scale: Factor on the scores.
            backend: Name of a backend, or ``None``.
            groups: A Blob of queries for each of ``task.held_queries``, then a pair of Blobs, keys
                and values, for each of ``task.held_keys``; never written to.

        Returns:
            Output and lse of every step, and what the task took.
        """
        queries: tuple[Blob, ...] = groups[: len(task.held_queries)]
        pairs: tuple[tuple[Blob, Blob], ...] = groups[len(task.held_queries) :]
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
        bytes_in = sum(blob.nbytes for blob in (*queries, *keys, *values))
        started = seconds = 0.0

        def compute() -> list[Partial]:
            nonlocal started, seconds
            held = [
                HeldTokens(
                    (tokens, blob.tensor().to(self._device))
                    for tokens, blob in zip(ranges, blobs, strict=True)
                )
                for ranges, blobs in (
                    (task.held_queries, queries),
                    (task.held_keys, keys),
                    (task.held_keys, values),
                )
            ]
            self._synchronize()
            started, start = time.time(), time.perf_counter()
            partials = Worker(backend).run(task, *held, scale=scale)
            self._synchronize()
            seconds = time.perf_counter() - start
            return partials

        partials, peak_bytes = measure_peak_bytes(compute, self._device)
        if self._device.type == "cpu":
            peak_bytes += bytes_in  # mapped from the store, not allocated
        results = [(Blob(partial.output), Blob(partial.lse)) for partial in partials]
        report = TaskReport(
            worker=task.worker,
            pid=os.getpid(),
            device=str(self._device),
            started=started,
            seconds=seconds,
            peak_bytes=peak_bytes,
            bytes_in=bytes_in,
            bytes_out=sum(output.nbytes + lse.nbytes for output, lse in results),
        )
        return results, report

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
