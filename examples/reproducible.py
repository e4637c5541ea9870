"""Compute one attention problem on every executor, and compare the bits of all results.

Run ``python examples/reproducible.py``. Each line has a digest of output, LSE and gradients on the
CPU: of this process with one and two threads, of ranks with shards of unequal lengths, of a Ray
cluster whose first worker is killed, and of a stream. The script fails unless all are equal.
"""

import hashlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import cqs

SEQLEN, HEADS, HEAD_DIM = 700, (4, 2), 32  # query and KV heads
OPTIONS: Any = {"is_causal": True, "reproducible": True, "num_tasks": 24, "return_lse": True}
BUDGET = "1280KiB"  # inputs, results and gradients have 2 MiB


def make_tensors() -> list[Tensor]:
    """Return query, key, value and the gradient of the output, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS[is_of_keys], SEQLEN, HEAD_DIM) for is_of_keys in (0, 1, 1, 0)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def compute(attend: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Return output, LSE and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output, lse = attend(*leaves, **OPTIONS)
    return [output.detach(), lse, *torch.autograd.grad(output, leaves, tensors[3])]


def digest(results: list[Tensor]) -> str:
    """Return a short hash of the bytes of tensors."""
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in results)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def compute_in_process(num_threads: int) -> str:
    """Compute the problem in this process."""
    torch.set_num_threads(num_threads)
    return digest(compute(cqs.attention, make_tensors()))


def compute_shard(rank: int, num_ranks: int, port: int, answers: Any) -> None:
    """Compute the shard of a rank; rank 0 puts the digest of the whole sequence into a queue."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    total = num_ranks * (num_ranks + 1)  # shards have 1, 2, ... times as many tokens as the first
    ends = [SEQLEN * i * (i + 1) // total for i in range(1, num_ranks)]
    shards = [tensor.tensor_split(ends, dim=2)[rank] for tensor in make_tensors()]
    own = compute(cqs.distributed.attention, shards)
    gathered: Any = [None] * num_ranks if rank == 0 else None
    dist.gather_object(own, gathered)
    if rank == 0:
        answers.put(digest([torch.cat(parts, dim=2) for parts in zip(*gathered, strict=True)]))
    dist.destroy_process_group()


def compute_on_ranks(num_ranks: int) -> str:
    """Compute the problem in new processes of a gloo group."""
    answers = mp.get_context("spawn").SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(compute_shard, (num_ranks, port, answers), num_ranks)
    return str(answers.get())


def compute_on_cluster() -> str:
    """Compute the problem on two workers, of which one is killed at the second result.

    Ray prints a long line about the killed process.
    """
    counts = []

    def kill(pairs_done: int, pairs_total: int) -> None:
        counts.append(pairs_done)
        if len(counts) == 2:
            os.kill(victim, signal.SIGKILL)

    with cqs.Cluster(num_workers=2, use_gpus=False) as cluster:
        victim = cluster.pids[0]
        results = compute(partial(cluster.attention, progress=kill), make_tensors())
        if victim in cluster.pids:
            raise SystemExit(f"worker {victim} was not killed")
    return digest(results)


def main() -> None:
    """Print a digest for each executor."""
    stream = partial(cqs.streaming.attention, memory_budget=BUDGET, device="cpu")
    executors: dict[str, Callable[[], str]] = {
        "this process, 1 thread": partial(compute_in_process, 1),
        "this process, 2 threads": partial(compute_in_process, 2),
        **{f"{number} ranks": partial(compute_on_ranks, number) for number in (2, 3, 4)},
        "2 Ray workers, 1 killed": compute_on_cluster,
        f"stream in {BUDGET}": lambda: digest(compute(stream, make_tensors())),
    }
    digests = set()
    for name, executor in executors.items():
        digests.add(found := executor())
        print(f"{name:23}  {found}", flush=True)
    if len(digests) > 1:
        raise SystemExit("the results differ")
    print("the results are bitwise identical")


if __name__ == "__main__":
    main()
