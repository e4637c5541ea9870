"""Eight processes that wait to be told what to run together."""

import os
import socket
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 8


class Ranks:
    """A gloo group of eight processes, and one of the first n of them for every n."""

    def __init__(self):
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pipes = [context.Pipe() for _ in range(NUM_RANKS)]
        self._pipes = [pipe for pipe, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, port, pipe), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, num_ranks, program, *arguments):
        """Return what ``program(group, *arguments)`` returns on each of the first ranks."""
        for pipe in self._pipes[:num_ranks]:
            pipe.send((num_ranks, program, arguments))
        found = []
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            assert pipe.poll(120), f"rank {rank} of {num_ranks} hangs"
            found.append(pipe.recv())
        errors = [error for _, error in found if error]
        assert not errors, "\n".join(errors)
        return [result for result, _ in found]

    def stop(self):
        for process in self._processes:
            process.kill()


def _serve(rank, port, pipe):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    groups = {n: dist.new_group(range(n)) for n in range(1, NUM_RANKS + 1)}
    while True:
        num_ranks, program, arguments = pipe.recv()
        try:
            pipe.send((program(groups[num_ranks], *arguments), None))
        except Exception:
            pipe.send((None, f"rank {rank}: {traceback.format_exc()}"))
