"""A rank that is no longer there ends the others, with an error that says so."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import make_context

import cqs.distributed
from cqs.distributed import Strategy
from cqs.executors.distributed.chunk_pass import ForwardPass

pytestmark = pytest.mark.slow


def join_group(backend, rank, num_ranks, file, **options):
    """Return three shards of this rank, on its device."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(file, num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, **options)
    device = "cuda" if backend == "nccl" else "cpu"
    return [torch.randn(1, 4, 20, 16, device=device) for _ in range(3)]


def attend_until_a_rank_fails(backend, rank, num_ranks, file, results, computed, heard, where):
    """Fail on rank 1 before a pass, or where it calls a method of the pass."""
    tensors = join_group(backend, rank, num_ranks, file)
    if where in PASSES:
        output = cqs.distributed.attention(*(tensor.requires_grad_() for tensor in tensors))
        computed.wait(60)  # or the exit of rank 1 would end the first call of another rank
        if rank == 1:
            os._exit(1)
    elif rank == 1:
        setattr(ForwardPass, where, lambda *arguments: os._exit(1))
    start = time.monotonic()
    try:
        if where == "backward":
            output.sum().backward()
        else:
            cqs.distributed.attention(*tensors, strategy=Strategy(1, num_chunks=4))
    except RuntimeError as error:
        results.put((rank, str(error), time.monotonic() - start))
    if where in PASSES:
        heard.wait()  # alive: the others are to report the failed rank, not this one


PASSES = {"forward": 8, "backward": 15}
"""Most seconds until all ranks have an error of the pass."""
FAILED, LOST = "a rank of the group has failed", "rows of other ranks were not received"


@pytest.mark.parametrize(
    ("backend", "where", "message"),
    [
        ("gloo", "forward", FAILED),
        ("gloo", "backward", FAILED),
        pytest.param("nccl", "forward", FAILED, marks=pytest.mark.gpu),
        ("gloo", "fetch", LOST),
        ("gloo", "send_results", LOST),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_failed_rank_ends_the_others_soon(backend, where, message, tmp_path):
    """Within a call at once: what they have sent each other is not waited for."""
    num_ranks = 5 if backend == "gloo" else num_gpus()
    context = make_context()
    results, heard = context.Queue(), context.Event()
    events = context.Barrier(num_ranks), heard
    arguments = num_ranks, str(tmp_path / "store"), results, *events, where
    processes = start_all(context, attend_until_a_rank_fails, num_ranks, backend, arguments)
    try:
        found = [results.get(timeout=60) for _ in range(num_ranks - 1)]
    finally:
        heard.set()
        for process in processes:
            process.join(timeout=60)
            process.kill()
    assert {rank for rank, *_ in found} == {*range(num_ranks)} - {1}  # its neighbours and others
    for _, text, seconds in found:
        assert text.startswith(message) and seconds < PASSES.get(where, 5)


def attend_and_die(backend, rank, num_ranks, file, directory):
    tensors = join_group(backend, rank, num_ranks, file, timeout=timedelta(seconds=5))
    os.dup2(os.open(f"{directory}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    cqs.distributed.attention(*tensors)
    if rank == 1:
        torch.cuda._sleep(10**11)  # a minute, which it will not see
    cqs.distributed.attention(*tensors)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_rank_that_fails_before_its_rows_are_there_ends_who_waits_for_them(tmp_path):
    num_ranks = num_gpus()
    arguments = num_ranks, str(tmp_path / "store"), str(tmp_path)
    processes = start_all(make_context(), attend_and_die, num_ranks, "nccl", arguments)
    for process in processes:
        process.join(timeout=60)
    expected = [-signal.SIGABRT] * num_ranks
    expected[1] = -signal.SIGKILL
    assert [process.exitcode for process in processes] == expected
    for rank in {*range(num_ranks)} - {1}:
        message = f"cqs: P2P copies of rank {rank} timed out after 5 s"
        assert message in (tmp_path / str(rank)).read_text()


def num_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return torch.cuda.device_count()


def start_all(context, program, num_ranks, backend, arguments):
    processes = [
        context.Process(target=program, args=(backend, rank, *arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes
