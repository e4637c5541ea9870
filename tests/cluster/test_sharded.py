"""Sequences on the actors: results are those of one process, whichever actor fails."""

import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import pytest
import torch
import torch.distributed as dist
from calls import cluster_of, notice_stalls_after
from support.exact import tensors_of

import cqs
from benchmarks.cases import Case
from cqs.distributed import Strategy
from cqs.executors.distributed.chunk_pass import ForwardPass
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.ray import TaskFailedError
from cqs.executors.ray.actor import TaskActor
from cqs.executors.verify import VerificationError

pytestmark = pytest.mark.ray

LONG = Case("long", 1501, 1501, num_heads=8, num_kv_heads=2, head_dim=64)
LENGTHS = 40, 0, 3, 70


@pytest.fixture(scope="module", autouse=True)
def pickle_by_value(ray_session):
    """Actors cannot import this file."""
    this = sys.modules[__name__]
    ray_session.cloudpickle.register_pickle_by_value(this)
    yield
    ray_session.cloudpickle.unregister_pickle_by_value(this)


def make(rank, num_ranks):
    """Shards of uneven lengths, one of them empty."""
    generator = torch.Generator().manual_seed(rank)
    shape = 1, 4, LENGTHS[rank], 16
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def whole(num_ranks=4):
    parts = zip(*(make(rank, num_ranks) for rank in range(num_ranks)), strict=True)
    return [torch.cat(part, dim=2) for part in parts]


def triple(output):
    return output, output.flip(1), output + 1


def count_shards(*_):
    """Runs on an actor: how many shards it keeps."""
    (actor,) = (found for found in gc.get_objects() if isinstance(found, TaskActor))
    return torch.tensor([len(actor._shards)])


def shards_on(cluster):
    counted = cluster.make_sharded(count_shards)
    return counted.to_local(dim=0).tolist()


def test_verification_catches_a_wrong_rank(cluster):
    """The rank is named, and the row of the whole sequence."""
    sharded = cluster.make_sharded(make)
    expected = cluster.attention(sharded, is_causal=True)
    output = cluster.attention(sharded, is_causal=True, verify=True)
    assert torch.equal(output.to_local(), expected.to_local())

    def attend_wrongly(*shard):
        attend = RankTask.attend

        def corrupt(self, *arguments, **options):
            attended = attend(self, *arguments, **options)
            if dist.get_rank() == 2:
                attended[0].output[:, 1, -1] += 0.01
            return attended

        RankTask.attend = corrupt
        try:
            return cqs.distributed.attention(*shard, verify=True)
        finally:
            RankTask.attend = attend

    with pytest.raises(
        VerificationError, match="rank 2 of the group: output of batch 0, head 1, row 42 dev"
    ) as caught:
        sharded.map(attend_wrongly, is_collective=True)
    assert caught.value.__notes__ == ["raised on rank 0 of 4"], "all ranks raise"


def test_layers_follow_each_other_without_the_driver(cluster):
    sharded = cluster.make_sharded(make)
    assert [shapes[0][2] for shapes in sharded.shapes] == list(LENGTHS)
    output = cluster.attention(sharded, is_causal=True)
    added = output.map(lambda output, query, key, value: output + query, sharded)
    twice = cluster.attention(added.map(triple), is_causal=True)

    query, key, value = whole()
    expected = cqs.attention(query, key, value, is_causal=True) + query
    torch.testing.assert_close(added.to_local(), expected, atol=1e-10, rtol=0)
    expected = cqs.attention(*triple(expected), is_causal=True)
    torch.testing.assert_close(twice.to_local(), expected, atol=1e-10, rtol=0)


def test_a_function_may_use_the_group(cluster):
    found = cluster.make_sharded(make).map(lambda *qkv: model(qkv[0]), is_collective=True)
    expected = whole()[0]
    for _ in range(2):
        expected = cqs.attention(expected, expected[:, ::4], expected[:, 1::4], is_causal=True)
    torch.testing.assert_close(
        found.to_local(), expected / expected.abs().sum(), atol=1e-10, rtol=0
    )


def test_a_function_that_fails_on_one_rank_ends_the_others(cluster):
    def fail_on_two(tensor):
        if dist.get_rank() == 2:
            raise KeyError("no such layer")
        dist.all_reduce(tensor)
        return tensor

    ones = cluster.make_sharded(lambda rank, num_ranks: torch.ones(3))
    with pytest.raises(KeyError, match="no such layer") as caught:
        ones.map(fail_on_two, is_collective=True)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


def test_any_dimension_and_number_of_tensors(cluster):
    """What is given and what is returned are copies."""
    hidden, positions = torch.randn(2, 10, 6), torch.arange(10).expand(2, 10)
    expected = 2 * hidden * positions.unsqueeze(-1)
    sharded = cluster.shard(hidden, positions, dim=1)
    local = sharded.to_local(dim=1)
    assert all(map(torch.equal, local, (hidden, positions)))
    hidden.zero_()
    local[0].zero_()
    doubled = sharded.map(lambda hidden, positions: 2 * hidden * positions.unsqueeze(-1))
    assert torch.equal(doubled.to_local(dim=1), expected)


def test_what_nothing_refers_to_is_freed(cluster):
    gc.collect()
    (before, *_) = shards_on(cluster)
    sharded = cluster.make_sharded(make)
    output = cluster.attention(sharded)
    mapped = output.map(triple)
    assert shards_on(cluster) == [before + 3] * 4
    del output
    assert shards_on(cluster) == [before + 2] * 4
    with pytest.raises(ZeroDivisionError):
        mapped.map(lambda *_: 1 / 0)
    del sharded, mapped
    gc.collect()  # the error's traceback refers to itself
    assert shards_on(cluster) == [before] * 4


@pytest.mark.parametrize("kind", [KeyError, RuntimeError])  # PyTorch raises the latter
def test_a_maker_that_raises_is_reported_with_its_rank_and_not_retried(cluster, tmp_path, kind):
    def raise_on_two(rank, num_ranks):
        (tmp_path / f"{rank}-{time.monotonic_ns()}").touch()
        if rank == 2:
            raise kind("no such file")
        return torch.ones(1)

    pids = cluster.pids
    with pytest.raises(kind, match="no such file") as caught:
        cluster.make_sharded(raise_on_two)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]
    assert len(os.listdir(tmp_path)) == 4 and cluster.pids == pids


def test_wrong_arguments_are_named(cluster, pair):
    """Options that no cluster has are refused in test_matrix.py."""
    sharded, (query, key, _) = cluster.make_sharded(make), whole()
    single, attend = cluster.attention(sharded), partial(cluster.attention, sharded)

    def limited(max_bytes):
        return attend(strategy=Strategy(max_bytes=max_bytes))

    ones, leaf, of_pair = torch.ones(3), key.requires_grad_(), pair.make_sharded(make)
    wrong = [
        (lambda: cluster.shard(), TypeError, "one tensor or several"),
        (lambda: cluster.shard(1), TypeError, r"tensors\[0\] must be a tensor, got int"),
        (lambda: cluster.shard(ones), ValueError, "dim must be .* got 2"),
        (lambda: cluster.shard(ones, dim="a"), TypeError, "dim must be an integer"),
        (lambda: cluster.shard(query, leaf), ValueError, r"^tensors\[1\] .*requires_grad=True"),
        (lambda: cluster.make_sharded(3), TypeError, "function must be callable, got 3"),
        (lambda: cluster.make_sharded(lambda *_: 3), TypeError, "a tensor or several, got int"),
        (
            lambda: cluster.make_sharded(lambda rank, _: [ones] * (1 + rank % 2)),
            ValueError,
            "got 2 on rank 1 and 1 on rank 0",
        ),
        (lambda: sharded.map(3), TypeError, "function must be callable, got 3"),
        (lambda: sharded.map(lambda *_: ()), TypeError, "a tensor or several, got none"),
        (lambda: sharded.map(triple, 3), TypeError, "sharded sequences, got int"),
        (lambda: sharded.map(triple, is_collective=1), TypeError, "must be a bool, got 1"),
        (lambda: pair.attention(sharded), ValueError, "must belong to this cluster"),
        (lambda: of_pair.map(min, sharded), ValueError, "must belong to this cluster"),
        (lambda: cluster.attention(single), ValueError, "query, key and value, got 1 tensors"),
        (lambda: cluster.attention(query), TypeError, "key and value must be"),
        (lambda: attend(verify=1), TypeError, "verify must be a bool, got 1"),
        (lambda: limited(0), ValueError, "max_bytes .* got 0"),
        (lambda: limited(100), ValueError, "max_bytes must be at least [0-9]+ .* got 100"),
        (lambda: attend(scale="a"), TypeError, "scale must be a number"),
        (lambda: attend(backend="fast"), ValueError, "backend must be"),
        (lambda: attend(backend="cudnn"), NotImplementedError, "CUDA"),
        (lambda: attend(strategy=Strategy(3)), ValueError, "head_parallel must be .* got 3"),
    ]
    for call, error, message in wrong:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(cluster.attention(sharded).to_local(), single.to_local())


@pytest.fixture(scope="module")
def problem():
    return LONG.make()


def model(output):
    """Runs on all actors together: two layers, and a collective of PyTorch's."""
    for _ in range(2):
        query, key, value = output, output[:, ::4].contiguous(), output[:, 1::4].contiguous()
        output = cqs.distributed.attention(query, key, value, is_causal=True)
    total = output.abs().sum()
    dist.all_reduce(total)
    return output / total


def answers(cluster, problem):
    """Two layers, what is between them, and two more in one call."""
    sharded = cluster.shard(*tensors_of(problem))
    first = cluster.attention(sharded, is_causal=True, dropout_p=0.1, seed=1, backend="reference")
    second = cluster.attention(
        first.map(lambda output: (output, output[:, ::4], output[:, 1::4])), is_causal=True
    )
    return first, second, second.map(model, is_collective=True)


def bits(sharded):
    return [each.to_local() for each in sharded]


@pytest.fixture(scope="module")
def undisturbed(cluster, pair, problem):
    return {each: bits(answers(each, problem)) for each in (cluster, pair)}


@pytest.mark.long
def test_lost_shards_are_made_again(cluster, problem, undisturbed, tmp_path):
    """In all ways in which they were made, though the sequences between are gone."""

    def log(rank, num_ranks):
        (tmp_path / f"{rank}-{time.monotonic_ns()}").touch()
        return make(rank, num_ranks)

    def change(rank, num_ranks):
        mark = tmp_path.parent / f"{tmp_path.name}-{rank}"
        length = 2 if mark.exists() else 1
        mark.touch()
        return torch.ones(length)

    first, second, third = answers(cluster, problem)
    made, changing = cluster.make_sharded(log), cluster.make_sharded(change)
    copied = cluster.shard(*made.map(lambda *shard: shard).to_local())
    del first, third
    assert len(os.listdir(tmp_path)) == 4
    os.kill(cluster.pids[1], signal.SIGKILL)
    assert torch.equal(second.to_local(), undisturbed[cluster][1])
    assert all(map(torch.equal, copied.to_local(), whole()))
    assert len(os.listdir(tmp_path)) == 4, "a copy needs no maker"
    assert all(map(torch.equal, made.to_local(), whole()))
    assert len(os.listdir(tmp_path)) == 5, "only the lost shard is made again"
    with pytest.raises(ValueError, match=r"must repeat the shapes .*\(\(1,\),\), got \(\(2,\),\)"):
        changing.to_local(dim=0)
    gc.collect()
    del made, changing, copied, second
    assert len(set(shards_on(cluster))) == 1, "nothing is left of what was between"


@pytest.mark.sample(9)
@pytest.mark.parametrize("is_settled", [False, True])
def test_what_was_made_before_a_failure_counts_if_all_were_done(pair, is_settled, tmp_path):
    """A first answer stands for the garbage of a GPU that waits for a rank when that fails."""

    def answer(shard):
        mark = tmp_path / str(dist.get_rank())
        is_first = not mark.exists()
        mark.touch()
        return torch.full_like(shard, is_first)

    made = pair.make_sharded(lambda rank, num_ranks: torch.zeros(1)).map(answer, is_collective=True)
    if is_settled:
        made.wait()
    os.kill(pair.pids[1], signal.SIGKILL)
    assert made.to_local(dim=0).tolist() == [float(is_settled), 0.0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("of", "number"), [("pair", 1), ("cluster", 2)])
def test_killed_workers_do_not_change_a_bit(request, problem, undisturbed, of, number, seed):
    """At a random moment of two layers, or between calls."""
    cluster = request.getfixturevalue(of)
    generator = random.Random(seed)
    victims = generator.sample(cluster.pids, number)

    def strike():
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(generator.uniform(0, 1), strike)
    timer.start()
    found = answers(cluster, problem)
    timer.join()
    assert all(map(torch.equal, bits(found), undisturbed[cluster]))
    assert not set(victims) & set(cluster.pids)


@pytest.mark.sample(99)
@pytest.mark.parametrize("part", ["fetch", "compute_away", "send_results"])
@pytest.mark.parametrize(("of", "number"), [("pair", 1), ("cluster", 2)])
def test_failures_in_each_part_of_a_call(request, problem, undisturbed, of, number, part, tmp_path):
    """Once each, when rows have been sent, before they are computed with, or with results sent."""

    def doomed_model(output):
        mark = tmp_path / str(dist.get_rank())
        if dist.get_rank() >= number or mark.exists():
            return model(output)
        mark.touch()
        method = getattr(ForwardPass, part)

        def die(*arguments, **options):
            if part != "compute_away":
                method(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(ForwardPass, part, die)
        try:
            return model(output)
        finally:  # if another failure ends this call first
            setattr(ForwardPass, part, method)

    cluster = request.getfixturevalue(of)
    _, second, _ = answers(cluster, problem)
    before = set(cluster.pids)
    found = second.map(doomed_model, is_collective=True).to_local()
    assert torch.equal(found, undisturbed[cluster][2])
    assert before - set(cluster.pids) and len(os.listdir(tmp_path)) == number


def test_a_stalled_worker_is_replaced(pair, problem, undisturbed, monkeypatch):
    """It hangs while the others wait for it in the exchange."""
    notice_stalls_after(5, pair, monkeypatch)
    sharded = pair.shard(*tensors_of(problem))
    victim = pair.pids[1]
    os.kill(victim, signal.SIGSTOP)
    output = pair.attention(
        sharded, is_causal=True, dropout_p=0.1, seed=1, backend="reference"
    ).to_local()
    assert torch.equal(output, undisturbed[pair][0])
    assert victim not in pair.pids and not os.path.exists(f"/proc/{victim}")


@pytest.mark.long
@pytest.mark.parametrize("is_settled", [False, True])
def test_a_worker_that_stalls_alone_is_replaced(pair, is_settled, monkeypatch):
    """In calls in which no other waits for it, or only to be told that all are done."""
    notice_stalls_after(5, pair, monkeypatch)
    ones = pair.make_sharded(lambda *_: torch.ones(1))
    ones = ones.map(lambda rows: rows, is_collective=True)
    if is_settled:
        ones.wait()
    victim, other = pair.pids
    os.kill(victim, signal.SIGSTOP)
    assert ones.map(lambda rows: rows + 1).to_local(dim=0).tolist() == [2, 2]
    assert other in pair.pids and victim not in pair.pids


@pytest.mark.long
@pytest.mark.parametrize("ends", ["raises", "exits"])
def test_workers_at_work_outlive_the_failure_of_another(cluster, ends, tmp_path):
    """They are waited for longer than those that do not answer, and no error is lost meanwhile."""

    def fail_once(rows):
        is_first = not (tmp_path / "mark").exists()
        if dist.get_rank() == 0 and is_first:
            time.sleep(0.5)
            (tmp_path / "mark").touch()
            os._exit(1) if ends == "exits" else {}["no such layer"]
        time.sleep(8 if is_first else 0)
        return rows + 1

    zeros, before = cluster.make_sharded(lambda *_: torch.zeros(1)), cluster.pids
    if ends == "raises":
        with pytest.raises(KeyError, match="no such layer") as raised:
            zeros.map(fail_once, is_collective=True)
        assert raised.value.__notes__ == ["raised on rank 0 of 4"]
    assert zeros.map(fail_once, is_collective=True).to_local(dim=0).tolist() == [1] * 4
    assert len(set(before) - set(cluster.pids)) == (ends == "exits")


@pytest.mark.long
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 3)])
def test_workers_meet_although_one_fails_to(ray_session, problem, tmp_path, number, seconds):
    """PyTorch counts what a process has tried to form, and a fresh one has tried nothing."""

    class Mortal(TaskActor):
        def join(self, generation, place, *arguments):
            if place[0] == 1 and not (tmp_path / "mark").exists():
                (tmp_path / "mark").touch()
                os.kill(os.getpid(), number)
            super().join(generation, place, *arguments)

    with cluster_of(Mortal, num_workers=2, stall_timeout=seconds) as cluster:
        sharded, before = cluster.shard(*tensors_of(problem)), cluster.pids
        output = cluster.attention(sharded, is_causal=True).to_local()
        assert number == signal.SIGSTOP or len(set(before) - set(cluster.pids)) == 1
    torch.testing.assert_close(output, cqs.attention(*tensors_of(problem), is_causal=True))


class StuckEvent:
    """That a GPU is done, which waits for a rank until its group is aborted."""

    def __init__(self, actor):
        self._actor, self._generation = actor, actor._generation

    def synchronize(self):
        while self._actor._generation == self._generation:
            time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("is_followed", [True, False])
def test_a_gpu_waits_no_longer_for_a_rank_that_has_failed(
    ray_session, problem, tmp_path, is_followed
):
    """Though its actor has answered, alone or with the rank that fails before other work."""

    class Lazy(TaskActor):
        def compute(self, number, pickled, place, *arguments):
            mark = tmp_path / str(place[0])
            if pickle.loads(pickled).name != "attention" or mark.exists():
                return super().compute(number, pickled, place, *arguments)
            mark.touch()
            if place[0] == 1:
                threading.Timer(0.5, os._exit, (1,)).start()
                time.sleep(0 if is_followed else 60)
            self._made = StuckEvent(self)
            return ((1,),)

        def _synchronize(self):
            self.settle()

    tensors = tensors_of(problem)

    def make_part(rank, num_ranks):
        return [tensor.tensor_split(num_ranks, 2)[rank] for tensor in tensors]

    with cluster_of(Lazy, num_workers=2, stall_timeout=120) as cluster:
        made = cluster.make_sharded(make_part).map(lambda *parts: parts, is_collective=True)
        before, start = cluster.pids, time.monotonic()
        found = cluster.attention(made, is_causal=True)
        if is_followed:
            output = cluster.attention(*tensors, is_causal=True)
        else:
            output = found.to_local()
        assert len(set(before) - set(cluster.pids)) == 1 and time.monotonic() - start < 60
    torch.testing.assert_close(output, cqs.attention(*tensors, is_causal=True))


@pytest.mark.parametrize("is_collective", [False, True])
def test_an_interrupted_call_leaves_nothing_behind(pair, is_collective, monkeypatch):
    ones, before = pair.make_sharded(lambda *_: torch.ones(1)), pair.pids
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ones.map(lambda rows: (time.sleep(1), rows)[1], is_collective=is_collective)
    assert ones.map(lambda rows: rows + 1).to_local(dim=0).tolist() == [2, 2]

    def interrupt_late(future):
        future.exception()  # waits
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cqs.executors.ray.dispatcher.Future.result", interrupt_late)
        ones.map(lambda rows: rows, is_collective=is_collective)
    gc.collect()
    assert shards_on(pair) == [1, 1]
    assert pair.pids == before


def test_a_function_that_kills_its_workers_is_named(pair):
    with pytest.raises(
        TaskFailedError, match=r"make_sharded failed 2 times.*rank 1 failed or hung"
    ):
        pair.make_sharded(lambda rank, num_ranks: os._exit(1) if rank else torch.ones(1))
    assert pair.make_sharded(lambda rank, num_ranks: torch.ones(1)).to_local(dim=0).sum() == 2


def test_closing_ends_a_call_and_everything_after(ray_session):
    cluster = cqs.Cluster(num_workers=1, use_gpus=False)
    sharded = cluster.shard(torch.ones(1), dim=0)
    timer = threading.Timer(0.5, cluster.close)
    timer.start()
    with pytest.raises(CancelledError):
        sharded.map(lambda _: time.sleep(60))
    with pytest.raises(ValueError, match="closed"):
        sharded.to_local()
