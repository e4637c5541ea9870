"""Memory that other ranks fetch from: what comes is what was sent, however streams interleave."""

import gc
import random
import threading
import time
from dataclasses import fields
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace

import fake_gpus
import pytest
import torch
from fake_gpus import World, current_rank, current_stream, later, synchronize

import cqs
from cqs.executors.distributed import rank_task, streamed_task
from cqs.executors.distributed.bounded import Limit, lay_out_within
from cqs.executors.distributed.transport import row_copies, streams, transfer
from cqs.executors.distributed.transport.streams import open_streams
from cqs.partial import Partial, RunningMerge
from cqs.problem import check_problem
from cqs.scheduler import AttentionShape
from cqs.scheduler.machines import FETCHED, MACHINES
from cqs.worker import Worker

pytestmark = pytest.mark.slow

GPU = torch.device("cuda", 0)


class LaterTask(rank_task.ChunkTask):
    """Launches what it computes, from the tokens that it holds at that time."""

    def compute_away(self, results):
        now = self._copy()
        current_stream().enqueue(lambda: now.compute_away(results))

    def compute_home(self, answer, *, keep):
        steps, queries = self.layout.home_steps, self.layout.queries
        straight = self.layout.is_final and not keep
        if not steps and not straight:
            return
        rows = slice(0, len(queries))
        if not straight:
            rows = slice(*(end - queries.start for end in (steps[0][1].start, steps[-1][1].stop)))
        now, results = self._copy(), self._nothing(rows.stop - rows.start)

        def compute():
            now.compute_home(answer, keep=keep)
            return now.home[0]

        self.home = launch(compute, results), rows

    def compute_own(self):
        if self.layout.own_steps:
            now = self._copy()

            def compute():
                now.compute_own()
                return now.own

            self.own = launch(compute, self._nothing(len(self.layout.queries)))

    def compute_gradients(self, *of_queries):
        now, found = self._copy(), tuple(torch.full_like(each, torch.nan) for each in self.held)
        return launch(lambda: now.compute_gradients(*of_queries), found)

    def merge(self, *arguments):
        now = self._copy()
        current_stream().enqueue(lambda: now.merge(*arguments))

    def _copy(self):
        return REAL_TASK(**{each.name: getattr(self, each.name) for each in fields(self)})

    def _nothing(self, num_rows):
        query, _, value = self.shards
        heads = len(self.chunk.query_heads[self.layout.rank])
        output = query.new_full((query.shape[0], heads, num_rows, value.shape[3]), torch.nan)
        return Partial(output, output[..., 0].clone())


REAL_TASK = rank_task.ChunkTask


class LaterWorker(Worker):
    """Launches what it computes."""

    def run_together(self, steps, *held):
        query, _, value = (each.sample for each in held)
        output = query.new_full((*query.shape[:3], value.shape[3]), torch.nan)
        compute = partial(super().run_together, steps, *held)
        return launch(compute, Partial(output, output[..., 0].clone()))

    def run_backward(self, steps, *held):
        found = [torch.full_like(each.sample, torch.nan) for each in held[:3]]
        return launch(partial(super().run_backward, steps, *held), found)


class LaterMerge:
    """Launches the steps of a merge."""

    def __init__(self, answer):
        self._answer, self._merge = answer, [None]
        current_stream().enqueue(lambda: self._merge.__setitem__(0, RunningMerge(answer)))

    def add_own(self, *arguments):
        current_stream().enqueue(lambda: self._merge[0].add_own(*arguments))

    def finish(self):
        current_stream().enqueue(lambda: self._merge[0].finish())
        return self._answer


class LaterSums(streamed_task._Sums):
    """Launches the steps of sums; in float64 they are the gradients themselves."""

    def __init__(self, gradients, chunk):
        super().__init__(gradients, chunk)
        for place, _ in (each for of_heads in self._sums for each in of_heads.values()):
            current_stream().enqueue(place.zero_)

    def add(self, *arguments):
        current_stream().enqueue(partial(super().add, *arguments))

    def finish(self):
        pass


def add_later(sums, found):
    if not sums:
        return [*found]
    add = partial(ADD, [*sums], [*found])
    current_stream().enqueue(lambda: add() and None)
    return sums


ADD = streamed_task._added


def launch(function, results):
    """Launch a function whose results are written to ``results``."""

    def run():
        for result, found in zip(results, function(), strict=True):
            result.copy_(found)

    current_stream().enqueue(run)
    return results


class Group:
    """What one rank knows as its process group."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank

    def size(self):
        return self.world.num_ranks

    def _get_backend(self, device):
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(hours=1)))


def make_world(num_ranks, seed):
    world = World(num_ranks, seed)
    world.groups = [Group(world, rank) for rank in range(num_ranks)]
    return world


@pytest.fixture
def peer_memory(monkeypatch):
    from cqs.executors.distributed.transport import ipc_memory, peer_memory

    fake_gpus.install(monkeypatch)
    of_group = SimpleNamespace(
        get_rank=lambda group: group.rank, get_world_size=lambda group: group.size()
    )
    as_bytes = ipc_memory.as_bytes
    driver, streams_made = fake_gpus.make_driver(), {}
    for module, name, value in (
        (peer_memory, "cuda_driver", driver),
        (ipc_memory, "cuda_driver", driver),
        (peer_memory, "dist", of_group),
        (peer_memory, "_WATCH_SECONDS", 0.01),
        (peer_memory, "_RELEASED_SECONDS", 0.01),
        (peer_memory, "control_group", lambda group: group),
        (peer_memory, "barrier", lambda group: group.world.swap([])),
        (ipc_memory, "barrier", lambda group: group.world.swap([])),
        (ipc_memory, "swap", lambda group, own: group.world.swap(own)),
        (ipc_memory, "as_bytes", lambda *place: as_bytes(*place[:2], torch.device("cpu"))),
        (transfer, "copy_rows", later(row_copies.copy_rows)),
        (rank_task, "ChunkTask", LaterTask),
        (rank_task, "_add_up", later(rank_task._add_up)),
        (streamed_task, "RunningMerge", LaterMerge),
        (streamed_task, "_added", add_later),
        (streamed_task, "_Sums", LaterSums),
        (rank_task, "open_streams", lambda device, number: open_streams(GPU, number)),
        (streams, "_streams", lambda device, number: streams_of_rank(streams_made, number)),
    ):
        monkeypatch.setattr(module, name, value)
    yield peer_memory
    gc.collect()
    for thread in threading.enumerate():
        if "_watch" in thread.name:
            thread.join(3)


def set_least_bytes(monkeypatch, number):
    """Have memory grow from so few bytes on."""
    from cqs.executors.distributed.transport import ipc_memory

    monkeypatch.setattr(ipc_memory, "_LEAST_BYTES", number)


def streams_of_rank(streams_made, number):
    rank = current_stream().rank
    if rank not in streams_made:
        streams_made[rank] = [fake_gpus.Stream() for _ in range(number)]
    return streams_made[rank]


def draw_calls(generator, num_ranks):
    """Draw attention calls that follow each other, of any sizes."""
    calls = []
    for _ in range(5):
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
                "gradients": generator.random() < 0.7,
                "max_bytes": generator.choice([None, 0, 10_000]),
            }
        )
    return calls


def make_task(transport, call, rank, worker):
    """Return a rank's task; without a fitting order, the one that holds the fewest bytes."""
    num_heads, num_kv_heads = call["heads"]
    shape = AttentionShape(num_heads, 3, num_kv_heads=num_kv_heads, itemsize=8)
    limit = Limit(call.get("max_bytes"), False, shape, has_buffer=True)
    layout, order, batches = lay_out_within(
        limit,
        call["lengths"],
        call["lengths"],
        rank,
        shape,
        head_parallel=call["head_parallel"],
        num_chunks=call["num_chunks"],
        is_causal=call["is_causal"],
        pattern=None,
        plan=call["plan"],
        tile=1,
        chunk_rule=FETCHED,
        with_gradients=call["gradients"],
        machine=MACHINES["H200"],
    )
    if order is None:
        return rank_task.RankTask(transport, layout, worker)
    later_worker = LaterWorker(worker.scale, "reference")
    return streamed_task.StreamedTask(transport, layout, later_worker, batches, order.resident)


def attend(transport, rank, call, tensors, new_pass=transfer.Pass):
    """Launch a call; return the rows of this rank's shard, and what will be its results."""
    rows = rows_of(call, rank)
    shards = [each[:, :, rows].clone() for each in tensors]
    return rows, launch_call(transport, rank, call, shards, new_pass)


def pass_to_confirm(world):
    """Return a pass of which the ranks know only after their first launches that all make it."""
    return transfer.Pass(0, cache(lambda: world.swap([])))


def rows_of(call, rank):
    first = sum(call["lengths"][:rank])
    return slice(first, first + call["lengths"][rank])


def launch_call(transport, rank, call, shards, new_pass=transfer.Pass):
    """Launch a call with the shards of query, key, value and gradient; return its results."""
    query, key, value, grad_output = shards
    problem = check_problem(query, key, value)
    worker = Worker(problem.scale, "reference", None, None)
    task = make_task(transport, call, rank, worker)
    gradients = call["gradients"]
    answer, kept = task.attend(problem, with_lse=gradients, keep=gradients, of_pass=new_pass())
    results = [answer.output]
    if gradients:
        shapes = [each.shape for each in (problem.query, problem.key, problem.value)]
        results += task.differentiate(shapes, kept, grad_output, of_pass=new_pass())
    return results


def draw_tensors(call):
    num_heads, num_kv_heads = call["heads"]
    return [
        torch.randn(1, heads, 40, 3, dtype=torch.float64)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    ]


def expect(call, tensors):
    """Compute output and gradients in one process."""
    *inputs, grad_output = tensors
    inputs = [each.clone().requires_grad_() for each in inputs]
    output = cqs.attention(*inputs, is_causal=call["is_causal"], backend="reference")
    return output.detach(), *torch.autograd.grad(output, inputs, grad_output)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_order_of_streams_gives_the_answer(peer_memory, monkeypatch, num_ranks, seed):
    """Calls follow each other without waiting for the streams."""
    monkeypatch.setattr(rank_task, "_MOST_AT_ONCE", 30 * (seed % 3))
    set_least_bytes(monkeypatch, 512 if seed % 2 else 1 << 21)
    torch.manual_seed(seed)
    calls = draw_calls(random.Random(100 * num_ranks + seed), num_ranks)
    whole = [draw_tensors(call) for call in calls]
    expected = list(map(expect, calls, whole))
    world, answers = make_world(num_ranks, seed), {}
    new_pass = partial(pass_to_confirm, world) if seed % 4 < 2 else transfer.Pass

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        answers[rank] = []
        for each in zip(calls, whole, strict=True):
            answers[rank].append(attend(transport, rank, *each, new_pass))
            if seed % 3 == 1:
                fake_gpus.set_stream(fake_gpus.Stream())
        synchronize()

    world.run(program)
    for rank in range(num_ranks):
        for (rows, results), of_whole in zip(answers[rank], expected, strict=True):
            for ours, exact in zip(results, of_whole, strict=False):
                torch.testing.assert_close(ours, exact[:, :, rows], rtol=1e-10, atol=1e-10)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_graphs_may_be_replayed_between_other_calls(peer_memory, monkeypatch, num_ranks, seed):
    """Of several calls, with other tokens each time, and with a call that needs more memory."""
    set_least_bytes(monkeypatch, 512)
    torch.manual_seed(seed)
    calls = draw_calls(random.Random(100 * num_ranks + seed), num_ranks)
    largest = calls[-1] | {"heads": (32, 32), "num_chunks": 8, "gradients": True}
    turns = [[draw_tensors(call) for call in calls] for _ in range(4)]
    expected = [list(map(expect, calls, whole)) for whole in turns]
    world, answers, of_largest = make_world(num_ranks, seed), {}, draw_tensors(largest)

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        rows = [rows_of(call, rank) for call in calls]
        shards = [
            [each[:, :, of_call].clone() for each in whole]
            for of_call, whole in zip(rows, turns[0], strict=True)
        ]
        for call, of_call in zip(calls, shards, strict=True):
            launch_call(transport, rank, call, of_call)
        graph = fake_gpus.Graph()
        with graph:
            results = [
                launch_call(transport, rank, call, of_call)
                for call, of_call in zip(calls, shards, strict=True)
            ]
        answers[rank] = []
        for turn, whole in enumerate(turns):
            for of_call, targets, sources in zip(rows, shards, whole, strict=True):
                for target, source in zip(targets, sources, strict=True):
                    later(target.copy_)(source[:, :, of_call])
            graph.replay()
            copies = [[torch.empty_like(each) for each in found] for found in results]
            for targets, sources in zip(copies, results, strict=True):
                for target, source in zip(targets, sources, strict=True):
                    later(target.copy_)(source)
            answers[rank].append(copies)
            if turn < 2:
                between = (calls[0], turns[1][0]), (largest, of_largest)
                attend(transport, rank, *between[turn])
        synchronize()

    world.run(program)
    for rank in range(num_ranks):
        for of_turn, exact_of_turn in zip(answers[rank], expected, strict=True):
            for call, results, exact in zip(calls, of_turn, exact_of_turn, strict=True):
                for ours, whole in zip(results, exact, strict=False):
                    right = whole[:, :, rows_of(call, rank)]
                    torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)


def keep_rows(monkeypatch):
    """Keep what comes, as a GPU's allocator does while its streams use it."""
    kept, new_rows = [], transfer.Packet.new_rows

    def new(packet, number):
        kept.append(new_rows(packet, number))
        return kept[-1]

    monkeypatch.setattr(transfer.Packet, "new_rows", new)


def test_a_rank_with_nothing_to_do_is_not_ahead_by_two_passes(peer_memory):
    """It would say that it has ended the second before others have seen that of the first."""
    call = draw_calls(random.Random(0), 2)[0]
    call |= {
        "lengths": (40, 0),
        "max_bytes": None,
        "gradients": False,
        "head_parallel": 1,
        "num_chunks": 1,
    }
    world, steps = make_world(2, 0), iter(range(500))

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        for number in range(4):
            if number == 1 and rank == 0:
                current_stream().enqueue(is_ready=lambda: next(steps, None) is None)
            attend(transport, rank, call, draw_tensors(call))
        synchronize()

    world.run(program)


def test_a_call_that_fails_can_be_left_out_of_a_graph(peer_memory, monkeypatch):
    call = draw_calls(random.Random(0), 2)[0]
    call |= {
        "lengths": (20, 20),
        "max_bytes": None,
        "gradients": False,
        "head_parallel": 1,
        "num_chunks": 2,
    }
    world = make_world(2, 0)
    keep_rows(monkeypatch)

    def fail(*_):
        raise RuntimeError("as if")

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        attend(transport, rank, call, draw_tensors(call))
        world.swap([])
        monkeypatch.setattr(LaterTask, "compute_away", fail)
        graph = fake_gpus.Graph()
        with graph, pytest.raises(RuntimeError, match="as if"):
            attend(transport, rank, call, draw_tensors(call))
        graph.replay()
        synchronize()

    world.run(program)


def test_forward_passes_of_long_sequences_take_one_stream(peer_memory, monkeypatch):
    call = draw_calls(random.Random(0), 2)[0]
    call |= {
        "lengths": (20, 20),
        "max_bytes": None,
        "gradients": True,
        "head_parallel": 1,
        "num_chunks": 2,
    }
    call |= {"heads": (2, 2), "is_causal": False}
    world, numbers = make_world(2, 0), {}

    def program(rank):
        def make_streams(device, number):
            most = rank_task._MOST_AT_ONCE
            numbers.setdefault((current_rank(), most), []).append(number)
            return open_streams(GPU, number)

        monkeypatch.setattr(rank_task, "open_streams", make_streams)
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        for most in (40, 39):
            world.swap([])
            monkeypatch.setattr(rank_task, "_MOST_AT_ONCE", most)
            attend(transport, rank, call, draw_tensors(call))
            synchronize()

    world.run(program)
    assert numbers == {
        (rank, most): [number, 2] for rank in (0, 1) for most, number in ((40, 2), (39, 1))
    }


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("failing_chunk", [0, 1])
def test_a_call_may_follow_one_that_failed_on_all_ranks(
    peer_memory, monkeypatch, failing_chunk, gradients
):
    """As if memory was short where results for other ranks are computed."""
    call = draw_calls(random.Random(0), 4)[0]
    call |= {
        "lengths": (10,) * 4,
        "max_bytes": None,
        "gradients": gradients,
        "head_parallel": 1,
        "num_chunks": 2,
    }
    call |= {"heads": (2, 2), "is_causal": True}
    tensors, world, failing = draw_tensors(call), make_world(4, 0), {}
    compute = LaterTask.compute_away
    keep_rows(monkeypatch)

    def fail(task, results):
        if failing[task.layout.rank] and task.chunk.index == failing_chunk:
            raise torch.OutOfMemoryError("as if")
        compute(task, results)

    monkeypatch.setattr(LaterTask, "compute_away", fail)

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        for failing[rank] in (False, True, False):
            if failing[rank]:
                with pytest.raises(torch.OutOfMemoryError, match="as if"):
                    attend(transport, rank, call, tensors)
            else:
                rows, (output, *_) = attend(transport, rank, call, tensors)
            synchronize()
            world.swap([])
        torch.testing.assert_close(output, expect(call, tensors)[0][:, :, rows])

    world.run(program)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_call_may_follow_one_on_which_the_ranks_disagree(peer_memory, monkeypatch, is_first):
    """What they have packed by then is not sent; also if they had no memory before."""
    set_least_bytes(monkeypatch, 512)
    call = draw_calls(random.Random(1), 3)[0]
    call |= {"lengths": (10, 20, 10), "max_bytes": None, "gradients": True, "num_chunks": 1}
    larger = call | {"heads": (8, 8)}
    tensors, world = draw_tensors(call), make_world(3, 1)
    expected = expect(call, tensors)
    keep_rows(monkeypatch)

    def disagree():
        world.swap([])
        raise ValueError("as if")

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        for number in range(3):
            if number or not is_first:
                rows, results = attend(transport, rank, call, tensors)
            for wrong in (call, larger):
                with pytest.raises(ValueError, match="as if"):
                    new_pass = partial(transfer.Pass, 0, disagree)
                    attend(transport, rank, wrong, draw_tensors(wrong), new_pass)
        rows, results = attend(transport, rank, call, tensors, partial(pass_to_confirm, world))
        synchronize()
        for ours, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, exact[:, :, rows], rtol=1e-10, atol=1e-10)

    world.run(program)


@pytest.mark.parametrize("seed", range(4))
def test_waits_for_a_failed_rank_can_be_released(peer_memory, seed):
    call = draw_calls(random.Random(seed), 3)[0] | {"lengths": (10, 20, 10), "gradients": False}
    tensors, world, done = draw_tensors(call), make_world(3, seed), []

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        attend(transport, rank, call, tensors)
        synchronize()
        world.swap([])
        if rank == 1:
            return
        attend(transport, rank, call, tensors)
        transport.release(5)
        synchronize()
        with pytest.raises(RuntimeError, match="aborted"):
            attend(transport, rank, call, tensors)
        done.append(rank)

    world.run(program)
    assert sorted(done) == [0, 2]


def test_memory_of_a_pass_that_was_released_is_freed(peer_memory):
    call = draw_calls(random.Random(0), 2)[0] | {"lengths": (20, 20), "gradients": False}
    tensors, world, memories = draw_tensors(call), make_world(2, 0), []

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        attend(transport, rank, call, tensors)
        synchronize()
        world.swap([])
        if rank == 0:
            memories.append(transport._memory)
            transport.begin(transfer.Pass())  # the other will never end such a pass
            transport.begin(transfer.Pass())
            transport.release(5)
            synchronize()

    world.run(program)
    gc.collect()
    end = time.monotonic() + 10
    while memories[0].addresses[0] and time.monotonic() < end:
        time.sleep(0.01)
    assert memories[0].addresses == [0, 0]


@pytest.mark.parametrize("has_grown", [False, True])
def test_replays_that_wait_for_a_failed_rank_can_be_released(peer_memory, monkeypatch, has_grown):
    """Also of graphs captured before there was more memory, on a stream that no call was on."""
    set_least_bytes(monkeypatch, 512)
    monkeypatch.setattr(peer_memory, "_RELEASED_SECONDS", 0.5)
    call = draw_calls(random.Random(0), 2)[0] | {"lengths": (20, 20), "gradients": False}
    larger = call | {"heads": (32, 32)}
    tensors, world, done = draw_tensors(call), make_world(2, 0), []
    keep_rows(monkeypatch)

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        attend(transport, rank, call, tensors)
        graph = fake_gpus.Graph()
        with graph:
            attend(transport, rank, call, tensors)
        if has_grown:
            attend(transport, rank, larger, draw_tensors(larger))
        graph.replay()
        synchronize()
        world.swap([])
        if rank == 1:
            return
        fake_gpus.set_stream(fake_gpus.Stream())
        graph.replay()
        transport.release(5)
        graph.replay()
        synchronize()
        done.append(rank)

    world.run(program)
    assert done == [0]


def test_gpus_that_do_not_reach_each_other_are_not_connected(peer_memory, monkeypatch):
    monkeypatch.setattr(
        peer_memory.cuda_driver, "open_memory", lambda handle: int(current_rank() != 1)
    )
    world, found = make_world(3, 0), []
    world.run(lambda rank: found.append(peer_memory.connect_peers(world.groups[rank], GPU)))
    assert found == [None, None, None]


def test_all_ranks_raise_if_one_has_no_memory(peer_memory, monkeypatch):
    call = draw_calls(random.Random(0), 2)[0] | {"lengths": (20, 20), "gradients": False}
    tensors, world, messages = draw_tensors(call), make_world(2, 0), []
    allocate = peer_memory.cuda_driver.allocate

    def allocate_little(num_bytes):
        return 0 if current_rank() == 1 and num_bytes > limit[0] else allocate(num_bytes)

    monkeypatch.setattr(peer_memory.cuda_driver, "allocate", allocate_little)
    set_least_bytes(monkeypatch, 512)
    limit = [600]

    def program(rank):
        transport = peer_memory.connect_peers(world.groups[rank], GPU)
        with pytest.raises(torch.OutOfMemoryError, match="send buffer of 0 MiB"):
            attend(transport, rank, call, tensors)
        messages.append(rank)
        world.swap([])
        limit[0] = 1 << 30
        _, (output,) = attend(transport, rank, call, tensors)
        synchronize()
        rows = slice(20 * rank, 20 * rank + 20)
        torch.testing.assert_close(output, expect(call, tensors)[0][:, :, rows])

    world.run(program)
    assert sorted(messages) == [0, 1]
