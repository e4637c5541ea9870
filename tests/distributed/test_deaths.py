"""A rank that is no longer there ends the others, with an error that says so."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import make_context

import cqs.distributed

NUM_RANKS = 5


def attend_until_somebody_dies(rank, file, results, all_have_heard):
    torch.set_num_threads(1)
    store = dist.FileStore(file, NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    tensors = [torch.randn(1, 4, 20, 16) for _ in range(3)]
    cqs.distributed.attention(*tensors)
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        cqs.distributed.attention(*tensors)
    except RuntimeError as error:
        results.put((rank, str(error), time.monotonic() - start))
    all_have_heard.wait()  # alive: the others are to hear of the dead one, not of this one


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dead_rank_ends_the_others_soon(tmp_path):
    context = make_context()
    results, all_have_heard = context.Queue(), context.Event()
    arguments = str(tmp_path / "store"), results, all_have_heard
    processes = [
        context.Process(target=attend_until_somebody_dies, args=(rank, *arguments), daemon=True)
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in range(NUM_RANKS - 1)]
    all_have_heard.set()
    for process in processes:
        process.join(timeout=60)
    assert {rank for rank, *_ in found} == {0, 2, 3, 4}  # its neighbours and others
    for _, message, seconds in found:
        assert message.startswith("not all ranks of the group answer") and seconds < 8
