"""Sharded sequences on a cluster: overhead of Ray, and time to recover from failures."""

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import cqs
from benchmarks.errors import verify_answer
from benchmarks.options import add_common, add_heads
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.timing import progress_bar, track
from cqs.distributed import Strategy, attention
from cqs.executors.distributed.chunk_pass import ForwardPass
from cqs.executors.ray.shards.sharded import Sharded
from cqs.executors.verify import VerificationError
from cqs.partial import Partial
from cqs.problem import check_problem
from cqs.report.measurement import Measurement, append_rows

_NUM_CALLS = 16
_NUM_LAYERS = 64
"""Number of layers of a run in which actors are killed."""
_ANY_MOMENT, _ANY_CALL = "any moment", "any call"
_PARTS = {"exchange": "fetch", "compute": "compute_away", "return": "send_results"}
"""Part of a call -> method at which actors are killed: after it, but before ``compute``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    add_heads(parser, 16)
    parser.add_argument(
        "--workers", type=int, metavar="P", help="default: one for each GPU, or core"
    )
    parser.add_argument(
        "--failures",
        type=int,
        metavar="T",
        help="how often half of the workers are killed, at every kind of moment; default: 0",
    )
    parser.add_argument("--only", metavar="NAME,NAME", help="kill workers at these moments only")


def run(
    *,
    tokens: Sequence[int] | None = None,
    heads: int = 16,
    kv_heads: int | None = None,
    head_dim: int = 128,
    repeats: int = 5,
    workers: int | None = None,
    failures: int = 0,
    only: str | None = None,
    out: str | None = None,
) -> None:
    """Verify and time causal calls on sequences that the actors of a private cluster make.

    Args:
        tokens: Lengths; ``None`` means 64K and 128K, or 1K and 2K without GPUs.
        heads: Number of query heads.
        kv_heads: Number of KV heads; ``None`` means as many as query heads.
        head_dim: Head dimension.
        repeats: Number of repeats.
        workers: Number of actors; ``None`` means one for each GPU, else for each core.
        failures: How often half of the actors are killed, for the first length: at a random moment
            of one call, at one of a run with two calls per layer, and in each part of a layer.
        only: Moments at which they are killed, separated by commas; ``None`` means all.
        out: File to append rows to, or ``None``.

    Raises:
        ValueError: ``only`` names an unknown moment or comes without ``failures``, or ``failures``
            comes with a single actor.
        VerificationError: Sampled rows deviate from float64, or a result is not bitwise identical
            after a failure.
    """
    lengths = tokens or ((2**16, 2**17) if torch.cuda.is_available() else (2**10, 2**11))
    if only and not failures:
        raise ValueError(f"only requires failures, got only={only!r}")
    names = _ANY_MOMENT, _ANY_CALL, *_PARTS
    moments = only.split(",") if only else names
    if unknown := [each for each in moments if each not in names]:
        raise ValueError(f"only must name some of {', '.join(names)}; got {unknown[0]!r}")
    rows: list[Measurement] = []
    with cqs.Cluster(num_workers=workers) as cluster:
        if failures and len(cluster.pids) < 2:
            raise ValueError("failures require at least two workers, got 1")
        for length in lengths:
            make = partial(_make, tokens=length, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
            shards = cluster.make_sharded(make)
            _check(cluster, shards)
            case = f"causal-{length}-h{heads}-kv{kv_heads or heads}-d{head_dim}"
            found = _time(cluster, shards, case, repeats)
            append_rows(found, out)
            rows += found
            if failures and length == lengths[0]:
                for moment in moments:
                    rows.append(_time_failures(cluster, shards, case, failures, moment))
                    append_rows(rows[-1:], out)
    publish(rows, make_columns(), None)


def _make(
    rank: int, num_ranks: int, *, tokens: int, heads: int, kv_heads: int | None, head_dim: int
) -> list[Tensor]:
    """Draw a shard of query, key and value, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(rank)
    num_rows = len(range(tokens)[rank::num_ranks])
    return [
        torch.randn(
            (1, number, num_rows, head_dim), generator=generator, dtype=dtype, device=device
        )
        for number in (heads, kv_heads or heads, kv_heads or heads)
    ]


def _check(cluster: cqs.Cluster, shards: Sharded) -> None:
    query, key, value = shards.to_local()
    output, lse = cluster.attention(shards, is_causal=True, return_lse=True).to_local()
    problem = check_problem(query, key, value, is_causal=True)
    verify_answer(problem, Partial(output, lse))


def _time(cluster: cqs.Cluster, shards: Sharded, case: str, repeats: int) -> list[Measurement]:
    """Time calls inside the workers, all in one call of the cluster, and one call each."""
    found: dict[str, list[float]] = {"in the workers": [], "one call": [], "a call each": []}
    for repeat in track(range(repeats + 1), repeats + 1, case):
        start = time.perf_counter()
        inside = shards.map(_time_inside, is_collective=True)
        one = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(_NUM_CALLS):
            output = cluster.attention(shards, is_causal=True)
        output.wait()
        each = time.perf_counter() - start
        if repeat:  # the first compiles
            seconds = float(torch.as_tensor(inside.to_local()).max()), one, each
            for name, of_all in zip(found, seconds, strict=True):
                found[name].append(of_all / _NUM_CALLS)
    baseline = found["in the workers"]
    return [
        _row(
            cluster,
            "sharded",
            case,
            name if seconds is baseline else f"ray, {name}",
            "in the workers",
            seconds,
            baseline,
        )
        for name, seconds in found.items()
    ]


def _time_inside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the seconds of consecutive calls, from a barrier until the GPU is idle."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_NUM_CALLS):
        attention(query, key, value, is_causal=True)
    if query.is_cuda:
        torch.cuda.synchronize()
    return torch.full((1, 1, 1, 1), time.perf_counter() - start, dtype=torch.float64)


def _time_failures(
    cluster: cqs.Cluster, shards: Sharded, case: str, failures: int, moment: str
) -> Measurement:
    """Kill half of the actors ``failures`` times; results must be those of undisturbed runs."""
    run = _run_in_calls if moment == _ANY_CALL else _run_in_one_call
    runs = [run(cluster, shards) for _ in range(3)]
    undisturbed, expected = min(each.seconds for each in runs), runs[0].answer
    if not all(torch.equal(expected, each.answer) for each in runs):
        raise VerificationError("undisturbed runs differ")
    number = len(cluster.pids) // 2
    draw = random.Random(0)
    found: list[float] = []
    bar = progress_bar(failures, f"killed in {moment}")
    while len(found) < failures:
        victims = draw.sample(cluster.pids, number)
        if moment in _PARTS:
            done = _run_in_one_call(
                cluster, shards, _PlannedKill(victims, moment, draw.randrange(_NUM_LAYERS))
            )
        else:
            with killing(victims, draw.uniform(0, undisturbed)):
                done = run(cluster, shards)
        if not torch.equal(done.answer, expected):
            raise VerificationError(
                f"the result is not bitwise identical after {number} workers were killed"
            )
        if set(victims).isdisjoint(done.pids):
            found.append(done.seconds)
            bar.update()
        else:  # the run ended before the kill; a failed worker may still have to be replaced
            run(cluster, shards)
    bar.close()
    name = f"ray, {number} killed" + ("" if moment == _ANY_MOMENT else f" in {moment}")
    row = _row(cluster, "failures", case, name, "undisturbed", found, [undisturbed] * failures)
    row.details["longest_ms"] = 1e3 * max(found)
    return row


class _PlannedKill(NamedTuple):
    """Which processes kill themselves, at which part of a call and in which layer."""

    pids: Sequence[int]
    part: str
    layer: int


class _Run(NamedTuple):
    """Seconds and result of a run over all layers."""

    seconds: float
    pids: Sequence[int]
    """Processes of the actors at the end."""
    answer: Tensor


def _run_in_one_call(
    cluster: cqs.Cluster, shards: Sharded, kill: _PlannedKill | None = None
) -> _Run:
    """Compute all layers in one call, in which actors may be killed."""
    start = time.perf_counter()
    return _finish(cluster, start, shards.map(partial(_layers, kill=kill), is_collective=True))


def _run_in_calls(cluster: cqs.Cluster, shards: Sharded) -> _Run:
    """Compute every layer in two calls of the cluster."""
    start = time.perf_counter()
    for _ in range(_NUM_LAYERS):
        shards = cluster.attention(shards, is_causal=True).map(_add, shards)
    return _finish(cluster, start, shards.map(_first))


def _finish(cluster: cqs.Cluster, start: float, output: Sharded) -> _Run:
    output.wait()
    seconds, pids = time.perf_counter() - start, cluster.pids
    answer = output.to_local()
    assert isinstance(answer, Tensor)
    return _Run(seconds, pids, answer)


def _add(output: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return query + 0.01 * output, key, value


def _first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query


def _layers(query: Tensor, key: Tensor, value: Tensor, *, kill: _PlannedKill | None) -> Tensor:
    """Compute layers, alternately with head-parallel degree 1 and with ``"auto"``."""
    for i in range(_NUM_LAYERS):
        attend = partial(attention, is_causal=True, strategy=Strategy((1, "auto")[i % 2]))
        if kill is not None and kill.layer == i and os.getpid() in kill.pids:
            name = _PARTS[kill.part]
            fatal = _make_fatal(kill.part, getattr(ForwardPass, name))
            with patch.object(ForwardPass, name, fatal):
                output = attend(query, key, value)
        else:
            output = attend(query, key, value)
        assert isinstance(output, Tensor)
        query = query + 0.01 * output
    return query


def _make_fatal(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> None:
        if part != "compute":
            method(*arguments, **options)
        if part != "exchange" and torch.cuda.is_available():
            torch.cuda.synchronize()  # all earlier work has finished
        kill([os.getpid()])

    return fail


def _row(
    cluster: cqs.Cluster,
    benchmark: str,
    case: str,
    executor: str,
    baseline: str,
    seconds: list[float],
    baseline_seconds: list[float],
) -> Measurement:
    return make_row(
        seconds,
        "bfloat16" if torch.cuda.is_available() else "float32",
        benchmark=benchmark,
        case=case,
        baseline=baseline,
        num_tasks=len(cluster.pids),
        executor=executor,
        ratio=baseline_seconds,
    )


@contextmanager
def killing(pids: Sequence[int], seconds: float) -> Iterator[None]:
    """Kill processes after some seconds, if the block does not end before."""
    timer = threading.Timer(seconds, kill, [pids])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kill(pids: Sequence[int]) -> None:
    """Send SIGKILL to processes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
