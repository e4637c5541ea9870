"""Memory that other ranks fetch from: what comes is what was sent, however streams interleave."""

import gc
import random
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import fake_gpus
import pytest
import torch
from fake_gpus import World, current_rank, current_stream, synchronize

import cqs
from cqs.executors.distributed import rank_task
from cqs.executors.distributed.bounded import Limit, lay_out_within
from cqs.executors.distributed.chunk_pass import ForwardPass
from cqs.executors.distributed.layout import ShardedWork
from cqs.executors.distributed.transport import ipc_memory, peer_memory, streams
from cqs.problem import check_problem
from cqs.scheduler import AttentionShape
from cqs.worker import Worker

pytestmark = pytest.mark.slow

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def emulated_gpus(monkeypatch):
    fake_gpus.install(monkeypatch)
    driver, open_streams = fake_gpus.Driver(), rank_task.open_streams
    streams_made = {}

    def streams_of_rank(device, number):
        made = streams_made.setdefault(current_rank(), [])
        made += [fake_gpus.Stream() for _ in range(number - len(made))]
        return made

    of_group = SimpleNamespace(
        get_rank=lambda group: current_rank(), get_world_size=lambda group: group.size()
    )
    for module, name, value in (
        (peer_memory, "cuda_driver", driver),
        (ipc_memory, "cuda_driver", driver),
        (ipc_memory, "as_bytes", lambda address, *_: driver.blocks[address]),
        (peer_memory, "dist", of_group),
        (peer_memory, "_WATCH_SECONDS", 0.01),
        (peer_memory, "_RELEASED_SECONDS", 0.01),
        (peer_memory, "timeout_of", lambda group: timedelta(hours=1)),
        (peer_memory, "control_group", lambda group: group),
        (peer_memory, "swap", World.swap),
        (ipc_memory, "swap", World.swap),
        (rank_task, "open_streams", lambda device, number: open_streams(GPU, number)),
        (streams, "_streams", streams_of_rank),
    ):
        monkeypatch.setattr(module, name, value)
    yield
    gc.collect()
    for thread in threading.enumerate():
        if "_watch" in thread.name:
            thread.join(3)


def run_ranks(num_ranks, program, seed=0):
    """Run ``program(world, rank, transport)`` on every rank; return what it returns on each."""
    world, found = World(num_ranks, seed), [None] * num_ranks

    def run_rank(rank):
        transport = peer_memory.connect_peers(world, GPU)
        found[rank] = program(world, rank, transport)
        synchronize()

    world.run(run_rank)
    return found


def set_least_bytes(monkeypatch, number):
    """Have memory grow from so few bytes on."""
    monkeypatch.setattr(ipc_memory, "_LEAST_BYTES", number)


def draw_calls(generator, num_ranks):
    """Draw attention calls that follow each other, of any sizes."""
    calls = []
    for _ in range(3):
        marks = sorted(generator.randint(0, 40) for _ in range(num_ranks - 1))
        lengths = tuple(b - a for a, b in zip([0, *marks], [*marks, 40], strict=True))
        calls.append(
            {
                "lengths": lengths,
                "heads": generator.choice([(4, 4), (4, 2), (8, 8)]),
                "head_parallel": generator.choice([1, num_ranks if 4 % num_ranks == 0 else 1]),
                "num_chunks": generator.choice([1, 2, 4, 8]),
                "plan": generator.choice(["quorums", "rows", "grid"]),
                "is_causal": generator.random() < 0.6,
                "with_gradients": generator.random() < 0.7,
                "max_bytes": generator.choice([None, 0, 10_000]),
            }
        )
    return calls


def make_call(*lengths, **changes):
    """Return a call of ranks with such shards, without gradients unless they are asked for."""
    call = {"lengths": lengths, "heads": (4, 2), "head_parallel": 1, "num_chunks": 2}
    return call | {"is_causal": True, "with_gradients": False, "max_bytes": None} | changes


def make_task(transport, call, rank, worker):
    """Return a rank's task; without a fitting order, the one that holds the fewest bytes."""
    options = dict(call)
    lengths, (num_heads, num_kv_heads) = options.pop("lengths"), options.pop("heads")
    shape = AttentionShape(num_heads, 3, num_kv_heads=num_kv_heads, itemsize=8)
    limit = Limit(options.pop("max_bytes"), False, shape, True, 4, with_lse=True)
    layout = lay_out_within(limit, ShardedWork(lengths, lengths, shape, **options), rank)
    return rank_task.RankTask(transport, layout, worker, *[call["with_gradients"]] * 2)


def rows_of(call, rank):
    first = sum(call["lengths"][:rank])
    return slice(first, first + call["lengths"][rank])


def cut_shards(call, rank, tensors):
    return [each[:, :, rows_of(call, rank)].clone() for each in tensors]


def attend(transport, rank, call, tensors):
    """Launch a call on this rank's shards of whole tensors; return what will be its results."""
    return launch_call(transport, rank, call, cut_shards(call, rank, tensors))


def launch_call(transport, rank, call, shards):
    """Launch a call with the shards of query, key, value and gradient; return its results."""
    query, key, value, grad_output = shards
    problem, has_gradients = check_problem(query, key, value), call["with_gradients"]
    task = make_task(transport, call, rank, Worker(problem.scale, "reference", None, None))
    answer, kept = task.attend(problem)
    results = [answer.output]
    if has_gradients:
        shapes = [each.shape for each in (query, key, value)]
        results += task.differentiate(shapes, kept, grad_output)
    return results


def draw_tensors(call):
    num_heads, num_kv_heads = call["heads"]
    return [
        torch.randn(1, heads, sum(call["lengths"]), 3, dtype=torch.float64)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]


def assert_exact(call, tensors, of_ranks):
    """Compare output and gradients of all ranks with those of one process."""
    *inputs, grad_output = tensors
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = cqs.attention(*inputs, is_causal=call["is_causal"], backend="reference")
    expected = output, *torch.autograd.grad(output, inputs, grad_output)
    for rank, results in enumerate(of_ranks):
        for ours, exact in zip(results, expected, strict=False):
            right = exact[:, :, rows_of(call, rank)]
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)


@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_order_of_streams_gives_the_answer(monkeypatch, num_ranks, seed):
    """Calls follow each other without waiting for the streams."""
    monkeypatch.setattr(rank_task, "_MOST_AT_ONCE", 30 * (seed % 3))
    set_least_bytes(monkeypatch, 512 if seed % 2 else 1 << 21)
    torch.manual_seed(seed)
    calls = draw_calls(random.Random(100 * num_ranks + seed), num_ranks)
    whole = [draw_tensors(call) for call in calls]

    def program(world, rank, transport):
        results = []
        for call, tensors in zip(calls, whole, strict=True):
            results.append(attend(transport, rank, call, tensors))
            if seed % 3 == 1:
                fake_gpus.set_stream(fake_gpus.Stream())
        return results

    for each in zip(calls, whole, *run_ranks(num_ranks, program, seed), strict=True):
        assert_exact(*each[:2], each[2:])


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_graphs_may_be_replayed_between_other_calls(monkeypatch, num_ranks, seed):
    """Of several calls, with other tokens each time, and with a call that needs more memory."""
    set_least_bytes(monkeypatch, 512)
    torch.manual_seed(seed)
    calls = draw_calls(random.Random(100 * num_ranks + seed), num_ranks)
    largest = calls[-1] | {"heads": (32, 32), "num_chunks": 8, "with_gradients": True}
    turns = [[draw_tensors(call) for call in calls] for _ in range(4)]
    between = [(calls[0], turns[1][0]), (largest, draw_tensors(largest))]

    def program(world, rank, transport):
        shards = [cut_shards(call, rank, each) for call, each in zip(calls, turns[0], strict=True)]

        def launch_all():
            of_calls = zip(calls, shards, strict=True)
            return [launch_call(transport, rank, call, of_call) for call, of_call in of_calls]

        launch_all()
        graph, found = fake_gpus.Graph(), []
        with graph:
            results = launch_all()
        for turn, whole in enumerate(turns):
            for call, targets, sources in zip(calls, shards, whole, strict=True):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source[:, :, rows_of(call, rank)])
            graph.replay()
            found += [[each.clone() for each in of_call] for of_call in results]
            if turn < 2:
                attend(transport, rank, *between[turn])
        return found

    whole = [tensors for of_turn in turns for tensors in of_turn]
    for each in zip(calls * 4, whole, *run_ranks(num_ranks, program, seed), strict=True):
        assert_exact(*each[:2], each[2:])


def test_a_rank_with_nothing_to_do_is_not_ahead_by_two_passes():
    """It would say that it has ended the second before others have seen that of the first."""
    call, steps = make_call(40, 0, num_chunks=1), iter(range(500))

    def program(world, rank, transport):
        for number in range(4):
            if number == 1 and rank == 0:
                current_stream().enqueue(is_ready=lambda: next(steps, None) is None)
            attend(transport, rank, call, draw_tensors(call))

    run_ranks(2, program)


def fail(*_):
    raise torch.OutOfMemoryError("as if")


@pytest.mark.sample(3)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("failing_chunk", [0, 1])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_call_may_follow_one_that_failed_on_all_ranks(
    monkeypatch, is_captured, failing_chunk, with_gradients
):
    """As if memory was short where results for other ranks are computed; also in a graph."""
    call = make_call(10, 10, 10, 10, heads=(2, 2), with_gradients=with_gradients)
    tensors, failing, compute = draw_tensors(call), {}, ForwardPass.compute_away

    def compute_or_fail(task, results):
        if failing[task.layout.rank] and task.chunk.index == failing_chunk:
            fail()
        compute(task, results)

    monkeypatch.setattr(ForwardPass, "compute_away", compute_or_fail)

    def program(world, rank, transport):
        for failing[rank] in (False, True, False):
            if failing[rank]:
                graph = fake_gpus.Graph()
                with graph if is_captured else nullcontext():
                    with pytest.raises(torch.OutOfMemoryError, match="as if"):
                        attend(transport, rank, call, tensors)
                graph.replay()
            else:
                results = attend(transport, rank, call, tensors)
            synchronize()
            world.swap()
        return results

    assert_exact(call, tensors, run_ranks(4, program))


def test_memory_of_a_pass_that_was_released_is_freed():
    call, memories = make_call(20, 20), []

    def program(world, rank, transport):
        attend(transport, rank, call, draw_tensors(call))
        synchronize()
        world.swap()
        if rank == 0:
            memories.append(transport._memory)
            transport.begin()  # the other will never end such a pass
            transport.begin()
            transport.release(5)

    run_ranks(2, program)
    gc.collect()
    end = time.monotonic() + 10
    while memories[0].addresses[0] and time.monotonic() < end:
        time.sleep(0.01)
    assert memories[0].addresses == [0, 0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_grown", [False, True])
@pytest.mark.parametrize("is_replayed", [False, True])
def test_waits_for_a_failed_rank_can_be_released(monkeypatch, is_replayed, has_grown, seed):
    """Also of graphs captured before there was more memory, on a stream that no call was on."""
    set_least_bytes(monkeypatch, 512)
    monkeypatch.setattr(peer_memory, "_RELEASED_SECONDS", 1)
    call, larger = make_call(10, 20, 10), make_call(10, 20, 10, heads=(32, 32))

    def program(world, rank, transport):
        launch = again = partial(attend, transport, rank, call, draw_tensors(call))
        launch()
        if is_replayed:
            graph = fake_gpus.Graph()
            with graph:
                launch()
            again = graph.replay
        if has_grown:
            attend(transport, rank, larger, draw_tensors(larger))
        again()
        synchronize()
        world.swap()
        if rank == 1:
            return
        fake_gpus.set_stream(fake_gpus.Stream())
        again()
        transport.release(5)
        if is_replayed:
            again()
        with pytest.raises(RuntimeError, match="aborted"):
            launch()

    run_ranks(3, program, seed)


def test_gpus_that_do_not_reach_each_other_are_not_connected(monkeypatch):
    def open_memory(handle):
        return int(current_rank() != 1)

    monkeypatch.setattr(peer_memory.cuda_driver, "open_memory", open_memory)
    assert run_ranks(3, lambda world, rank, transport: transport) == [None, None, None]


def test_all_ranks_raise_if_one_has_no_memory(monkeypatch):
    call, limit, allocate = make_call(20, 20), [600], peer_memory.cuda_driver.allocate
    tensors = draw_tensors(call)

    def allocate_little(num_bytes):
        return 0 if current_rank() == 1 and num_bytes > limit[0] else allocate(num_bytes)

    monkeypatch.setattr(peer_memory.cuda_driver, "allocate", allocate_little)
    set_least_bytes(monkeypatch, 512)

    def program(world, rank, transport):
        with pytest.raises(torch.OutOfMemoryError, match="send buffer of 0 MiB"):
            attend(transport, rank, call, tensors)
        world.swap()
        limit[0] = 1 << 30
        return attend(transport, rank, call, tensors)

    assert_exact(call, tensors, run_ranks(2, program))
