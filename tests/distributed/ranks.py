"""Processes that wait for functions to run together."""

import os
import socket
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def make_context():
    """Where processes begin with what takes long to import."""
    context = mp.get_context("forkserver")
    # DTensor imports torch._dynamo where it is first used.
    context.set_forkserver_preload(["cqs.nn", "support.exact", "pytest", "torch._dynamo"])
    return context


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_as_torchrun(num_ranks, program, *arguments, start_method=None):
    """Call a function in new processes with the environment of torchrun's.

    With "fork" they are copies of this process, and have imported what it has.
    """
    context = make_context() if start_method is None else mp.get_context(start_method)
    port = find_free_port()
    processes = [
        context.Process(target=_run_as_rank, args=(rank, num_ranks, port, program, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * num_ranks


def _run_as_rank(rank, num_ranks, port, program, arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    program(*arguments)


class Ranks:
    """A group of processes, and one of the first n of them for every n.

    Where GPUs are fewer than ranks, several share one, which NCCL refuses: they meet by gloo.
    """

    def __init__(self, num_ranks=8, device="cpu"):
        context, port = make_context(), find_free_port()
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._pipes = [pipe for pipe, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(device, rank, num_ranks, port, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, num_ranks, program, *arguments, **options):
        """Return what ``program(group, *arguments)`` returns on each of the first ranks."""
        for pipe in self._pipes[:num_ranks]:
            pipe.send((num_ranks, program, arguments, options))
        found = [pipe.recv() if pipe.poll(120) else None for pipe in self._pipes[:num_ranks]]
        errors = [answer[1] for answer in found if answer and answer[1]]
        errors += [f"rank {rank} hangs" for rank, answer in enumerate(found) if answer is None]
        assert not errors, "\n".join(errors)
        return [answer[0] for answer in found]

    def stop(self):
        for process in self._processes:
            process.kill()


def _serve(device, rank, num_ranks, port, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % num_gpus)
        backend = "nccl" if num_ranks <= num_gpus else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=num_ranks)
    groups = {n: dist.new_group(range(n)) for n in range(1, num_ranks + 1)}
    while True:
        num_ranks, program, arguments, options = pipe.recv()
        try:
            pipe.send((program(groups[num_ranks], *arguments, **options), None))
        except Exception:
            pipe.send((None, f"rank {rank}: {traceback.format_exc()}"))
