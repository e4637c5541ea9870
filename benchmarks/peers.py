"""Methods of context parallelism, timed in one process group around one kernel."""

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.errors import verify_answer, verify_close, verify_output
from benchmarks.options import CAUSAL, add_common, add_heads, add_passes
from benchmarks.peer_methods import METHODS
from benchmarks.peer_methods.alone import One
from benchmarks.peer_methods.differentiable import attend_whole
from benchmarks.peer_methods.method import Method
from benchmarks.peer_patterns import NAMES, PER_HEAD, draw_pattern
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.ranks import join_ranks
from benchmarks.timing import time_by_wall_clock, time_calls, track
from cqs.arguments import as_integer
from cqs.executors.distributed.transport.connections import transport_of
from cqs.executors.verify import VerificationError
from cqs.partial import Gradients, Partial
from cqs.problem import Problem, check_problem
from cqs.problem.options import ProblemOptions
from cqs.report.exact import verify_gradients
from cqs.report.measurement import Measurement, append_rows
from cqs.report.timing import make_timer, run_in_turn
from cqs.worker.backends import check_backend_name

_MAX_CALLS = 20
"""Most calls of a loop."""
_TARGET_SECONDS = 0.4
"""Time of a loop of slow calls, of which there are at least two."""
_NUM_LOOPS = 3
"""Number of loops of each computation."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""With 1 a GPU starts NCCL's kernels before attention kernels that were launched later."""
_SHOWN = "tflops_per_rank", "efficiency", "balance", "call_ms", "loop_ms", "peak_bytes"
"""Details in the printed table."""
_WITHOUT_NCCL = ("one", "cqs", "cqs quorums", "cqs limited", "grid")
"""Methods that send nothing, or by peer-to-peer copies, which more connections overlap."""

Passes = dict[str, dict[str, Callable[[], Any]]]
"""Name of a pass -> name of a method -> its computation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    add_heads(parser, 16)
    add_passes(parser)
    parser.add_argument("--pattern", choices=NAMES, help="instead of --causal")
    parser.add_argument("--only", metavar="NAME,NAME", help="these methods alone")
    parser.add_argument("--backend", metavar="NAME", help='also "best"; default: triton')


def run(
    *,
    tokens: Sequence[int] | None = None,
    heads: int = 16,
    kv_heads: int | None = None,
    head_dim: int = 128,
    causal: str = "both",
    pattern: str | None = None,
    backward: str = "yes",
    repeats: int = 9,
    only: str | None = None,
    backend: str | None = None,
    out: str | None = None,
) -> None:
    """Verify and time all methods on the ranks that torchrun started: one GPU each, or CPUs.

    A time is that of the slowest rank, from a barrier on. GPUs are busy when a computation is
    launched, as in the middle of a model. "call ms" is the host time of a call, and "loop ms" the
    time of a call in a loop of calls alone. "forward" is a forward pass without gradients; "both"
    is a forward pass that saves state, and the backward pass. FLOPs are ``4 d`` per live pair and
    head forward and 2.5 times that backward. "busiest / mean" is of the live pairs of ranks.
    Efficiency is the time of one GPU, divided by the number of GPUs times this time. On GPUs
    methods of NCCL run in processes with ``CUDA_DEVICE_MAX_CONNECTIONS=1``, after the others;
    ``one``, if named, runs in both. If the variable is set, all methods run in one process with its
    value.

    Args:
        tokens: Sequence lengths, at least 2 for each rank; ``None`` means 32K and 128K, or 2K on
            CPUs.
        heads: Number of query heads.
        kv_heads: Number of KV heads; ``None`` means as many as query heads.
        head_dim: Head dimension.
        causal: ``"yes"``, ``"no"`` or ``"both"``.
        pattern: A sparse pattern, see :func:`benchmarks.peer_patterns.draw_pattern`; ``None`` means
            attention that is dense or ``causal``.
        backward: ``"yes"`` or ``"no"``: whether to time both passes too.
        repeats: Number of repeats.
        only: Names of methods, separated by commas; ``None`` means all.
        backend: Backend of all methods except PyTorch's: a name, or ``"best"`` for the default of
            each call; ``None`` means ``triton`` on GPUs, the default on CPUs.
        out: File to append rows to, or ``None``.

    Raises:
        ValueError: torchrun did not start this process, a method or backend is unknown, there are
            too few tokens, or the pattern does not support the tokens or KV heads.
        VerificationError: A result is wrong; raised on every rank.
    """
    names = only.split(",") if only else list(METHODS)
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"only must name some of {', '.join(METHODS)}; got {unknown[0]!r}")
    check_backend_name(None if backend == "best" else backend)
    if "RANK" not in os.environ:
        raise ValueError(
            "peers requires one process per GPU: start it by "
            "torchrun --nproc-per-node 4 -m benchmarks peers"
        )
    for length in tokens or []:  # one token alone has a zero gradient, and errors are relative
        as_integer("tokens", length, 2 * int(os.environ["WORLD_SIZE"]))
    on_gpu = torch.cuda.is_available()
    if on_gpu and _CONNECTIONS not in os.environ and (runs := _separate(names)):
        for number, (some, setting) in enumerate(runs):
            _run_again(some, number, setting)
        return
    device = join_ranks()
    rows: list[Measurement] = []
    for length in tokens or ([32768, 131072] if on_gpu else [2048]):
        if pattern == PER_HEAD and kv_heads not in (None, heads):
            raise ValueError(f"kv_heads must be {heads} for {pattern}, got {kv_heads}")
        masks: list[ProblemOptions] = [{"is_causal": each} for each in CAUSAL[causal]]
        if pattern is not None:
            masks = [{"pattern": draw_pattern(pattern, length, heads)}]
        for mask in masks:
            *tensors, grad_output = draw(length, heads, kv_heads or heads, head_dim, device)
            rows += measure(
                dist.group.WORLD,
                names,
                check_problem(*tensors, **mask),
                grad_output if backward == "yes" else None,
                repeats=repeats,
                backend=backend,
                out=out,
                label=pattern,
            )
    if rows:
        publish(rows, make_columns(*_SHOWN), None)
    dist.destroy_process_group()


def _separate(names: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the methods and the environment of each process; nothing if none uses NCCL."""
    of_nccl = [name for name in names if name not in _WITHOUT_NCCL]
    others = [name for name in names if name in _WITHOUT_NCCL]
    if not of_nccl:
        return []
    runs = [([name for name in others if name == "one"] + of_nccl, {_CONNECTIONS: "1"})]
    return [*runs, (others, {})] if others not in ([], ["one"]) else runs


def _run_again(names: Sequence[str], number: int, setting: Mapping[str, str]) -> None:
    """Run this command for some methods in a new process of each rank.

    Args:
        names: The methods.
        number: Number of this run, which gives its rendezvous keys of their own.
        setting: Environment variables of the process, besides those of this one.

    Raises:
        subprocess.CalledProcessError: The process failed.
    """
    environment = os.environ | setting | {"TORCHELASTIC_RESTART_COUNT": str(number)}
    command = [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--only", ",".join(names)]
    subprocess.run(command, env=environment, check=True)


def measure(
    group: Any,
    names: Sequence[str],
    problem: Problem,
    grad_output: Tensor | None,
    *,
    repeats: int,
    backend: str | None = None,
    out: str | None = None,
    count_bytes: Callable[[], int] | None = None,
    label: str | None = None,
) -> list[Measurement]:
    """Verify and time methods; every rank of the group calls this.

    Args:
        group: The process group.
        names: Names of methods. Those that do not support the problem are left out, with a line
            that states the reason.
        problem: The problem, the same on every rank.
        grad_output: Gradient of the output, the same on every rank; ``None`` for no backward pass.
        repeats: Number of repeats.
        backend: See :func:`run`.
        out: File to append rows to, or ``None``.
        count_bytes: Returns the bytes that this rank's host has sent, ever; ``None`` if they are
            not recorded.
        label: Name of the pattern in the rows; ``None`` if there is none.

    Returns:
        The rows on the first rank, an empty list on the others.

    Raises:
        VerificationError: A result is wrong; raised on every rank.
    """
    chosen = backend or ("triton" if problem.query.is_cuda else "best")
    rows, device = [], problem.query.device
    methods = _make_methods(group, names, problem, None if chosen == "best" else chosen)
    for what, passes in _prepare(group, methods, problem, grad_output).items():
        details = {
            name: _describe(methods[name], compute, group, count_bytes)
            for name, compute in passes.items()
        }
        seconds = time_together(passes, repeats, group, device)
        if device.type == "cuda":
            calls, loops = time_calls(passes, repeats), time_loops(passes, seconds, group, device)
            for name in passes:
                details[name] |= {"call_ms": 1e3 * calls[name], "loop_ms": 1e3 * loops[name]}
        if dist.get_rank(group) == 0:
            case = _case(problem, label) + ("" if backend is None else f"-{backend}")
            found = _rows(what, case, problem, seconds, details, dist.get_world_size(group))
            append_rows(found, out)
            rows += found
    return rows


def _describe(
    method: Method,
    compute: Callable[[], Any],
    group: Any,
    count_bytes: Callable[[], int] | None,
) -> dict[str, float]:
    """Return what a row says of a computation besides its times."""
    scores, query = _gather(method.count_scores(compute), group), method.problem.query
    _, heads, tokens, _ = query.shape
    details: dict[str, float] = {
        "tokens": tokens,
        "heads": heads,
        "kv_heads": method.problem.key.shape[1],
        "ranks": len(scores),
        "density": sum(scores) / (heads * tokens**2),
    }
    if not isinstance(method, One):
        details["balance"] = max(scores) * len(scores) / sum(scores)
    if query.is_cuda:
        details["peak_bytes"] = peak_bytes(compute, group)
    if query.is_cuda and _CONNECTIONS in os.environ:
        details["max_connections"] = int(os.environ[_CONNECTIONS])
    if count_bytes is not None:
        details |= count_link_bytes(compute, group, count_bytes)
    return details


def draw(
    tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> list[Tensor]:
    """Draw query, key, value and the gradient of the output, the same on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [
        torch.randn(
            (tokens, 1, number, head_dim), generator=generator, dtype=dtype, device=device
        ).movedim(0, 2)
        for number in (heads, kv_heads, kv_heads, heads)
    ]


def _make_methods(
    group: Any, names: Sequence[str], problem: Problem, backend: str | None
) -> dict[str, Method]:
    """Return the methods that support a problem; print why others are left out."""
    methods = {}
    for name in names:
        method = METHODS[name](group, problem, backend)
        if (reason := method.why_not()) is None:
            methods[name] = method
        elif method.rank == 0:
            print(f"{name} is left out: it {reason}")
    return methods


def _prepare(
    group: Any, methods: Mapping[str, Method], problem: Problem, grad_output: Tensor | None
) -> Passes:
    """Return the verified computation of each pass by each method."""
    tensors, expected = (problem.query, problem.key, problem.value), tuple[Tensor, ...]()
    if grad_output is not None and methods:
        first = next(iter(methods.values()))
        expected = _expected_gradients(problem, first.backend, grad_output, group)
    passes: Passes = {what: {} for what in ("forward", "both")[: 2 if expected else 1]}
    for name, method in methods.items():
        shard = [method.shard(tensor) for tensor in tensors]
        passes["forward"][name] = partial(_attend, method, shard)
        output, gradients = passes["forward"][name](), ()
        if grad_output is not None:
            grad = method.shard(grad_output)
            passes["both"][name] = partial(_differentiate, method, shard, grad)
            gradients = passes["both"][name]()
        verify = partial(_verify, name, method, output, gradients, expected)
        verify_together(verify, group)
        del output, gradients, verify
    return passes if methods else {}


@torch.no_grad()
def _attend(method: Method, shard: Sequence[Tensor]) -> Tensor:
    """Return the output of a forward pass without gradients."""
    return method.forward(*shard)[0]


@torch.enable_grad()
def _differentiate(
    method: Method, shard: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients, after a forward and a backward pass."""
    _, saved = method.forward(*shard)
    return method.backward(saved, grad_output)


def _expected_gradients(
    problem: Problem, backend: str | None, grad_output: Tensor, group: Any
) -> tuple[Tensor, ...]:
    """Return the verified gradients of one device."""
    leaves = [t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value)]
    attend = partial(attend_whole, problem, backend, problem.pattern, *leaves)
    answer = Partial(*attend(return_lse=True))
    expected = torch.autograd.grad(answer.output, leaves, grad_output)
    output, lse = answer.output.detach(), answer.lse

    def verify_expected() -> None:
        for (_, heads), part in problem.parts():
            own = Partial(output[:, heads], lse[:, heads])
            verify_answer(part, own)
            gradients = Gradients(*(gradient[:, heads] for gradient in expected))
            verify_gradients(part, own, grad_output[:, heads], gradients, name="one:")

    verify_together(verify_expected, group)
    return expected


def _verify(
    name: str,
    method: Method,
    output: Tensor,
    gradients: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> None:
    """Compare this rank's output with float64, and its gradients with those of one device."""
    tokens = [torch.arange(r.start, r.stop) for r in method.tokens(method.problem.query.shape[2])]
    rows = torch.cat(tokens).to(output.device)
    for (_, heads), part in method.problem.parts():
        verify_output(part, output[:, heads], rows, name=f"{name}: output")
    sides = Gradients._fields[: len(expected)]  # none for a forward pass alone
    for side, ours, whole in zip(sides, gradients, expected, strict=True):
        verify_close(f"{name}: gradient of the {side}", ours, method.shard(whole))


def verify_together(verify: Callable[[], object], group: Any) -> None:
    """Run a check on every rank; raise the VerificationError of the first that fails on all."""
    failure = None
    try:
        verify()
    except VerificationError as error:
        failure = str(error)
    for each in _gather(failure, group):
        if each is not None:
            raise VerificationError(each)


def _gather(value: Any, group: Any) -> list[Any]:
    """Return the values of all ranks."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def peak_bytes(compute: Callable[[], Any], group: Any) -> int:
    """Return the largest peak memory of a rank during a computation; 0 without GPUs."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    device = torch.device("cuda", torch.cuda.current_device())
    transport = transport_of(group or dist.group.WORLD, device)
    transport.peak_bytes = 0
    before = torch.cuda.memory_allocated()
    compute()
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated() - before
    peak = torch.tensor(allocated + transport.peak_bytes, device="cuda")
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    return int(peak)


def count_link_bytes(
    compute: Callable[[], Any], group: Any, count_bytes: Callable[[], int]
) -> dict[str, float]:
    """Return the bytes that a host sends during a computation: the mean, and the largest."""
    dist.barrier(group)
    before = count_bytes()
    compute()
    dist.barrier(group)
    found = _gather(count_bytes() - before, group)
    return {"link_bytes": sum(found) / len(found), "most_link_bytes": max(found)}


def time_together(
    passes: dict[str, Callable[[], Any]], repeats: int, group: Any, device: torch.device
) -> dict[str, list[float]]:
    """Time methods in turn; return the seconds of the slowest rank for every repeat."""
    signal = torch.zeros(1, device=device)
    timer = make_timer(lambda: dist.all_reduce(signal, group=group))

    def timed(compute: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(group)
            return timer.time(compute)[0]

        return run

    timed_passes = {name: timed(compute) for name, compute in passes.items()}
    turns = run_in_turn(timed_passes, repeats)
    rounds = list(track(turns, repeats, is_shown=dist.get_rank(group) == 0))
    return _slowest(passes, rounds, group, device)


def time_loops(
    passes: dict[str, Callable[[], Any]],
    seconds: dict[str, list[float]],
    group: Any,
    device: torch.device,
) -> dict[str, float]:
    """Return the seconds of a call in a loop of calls: the median of three loops.

    Args:
        passes: The computations, by name.
        seconds: Seconds of each, equal on all ranks; they determine the number of calls.
        group: The process group.
        device: The device of this rank.
    """

    def run(name: str) -> float:
        of_call = statistics.median(seconds[name])
        number = max(2, min(_MAX_CALLS, int(_TARGET_SECONDS / of_call)))

        def loop() -> None:
            for _ in range(number):
                passes[name]()

        dist.barrier(group)
        return time_by_wall_clock(loop)[0] / number

    rounds = list(run_in_turn({name: partial(run, name) for name in passes}, _NUM_LOOPS))
    slowest = _slowest(passes, rounds, group, device)
    return {name: statistics.median(of_loops) for name, of_loops in slowest.items()}


def _slowest(
    names: Iterable[str], rounds: Sequence[dict[str, float]], group: Any, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank in every round, by name, in the order of names."""
    names = list(names)
    table = [[found[name] for found in rounds] for name in names]
    slowest = torch.tensor(table, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return dict(zip(names, slowest.tolist(), strict=True))


def _case(problem: Problem, label: str | None) -> str:
    _, heads, tokens, head_dim = problem.query.shape
    kind = label.replace(":", "-") if label else "causal" if problem.is_causal else "full"
    return f"{kind}-{tokens}-h{heads}-kv{problem.key.shape[1]}-d{head_dim}"


def _rows(
    what: str,
    case: str,
    problem: Problem,
    seconds: dict[str, list[float]],
    details: dict[str, dict[str, float]],
    num_ranks: int,
) -> list[Measurement]:
    flops = {"forward": 4.0, "both": 14.0}[what] * math.prod(problem.query.shape)
    flops *= problem.key.shape[2]
    baseline = "one" if "one" in seconds else next(iter(seconds))
    rows = []
    for name, own in seconds.items():
        found, ranks = details[name], 1 if name == "one" else num_ranks
        rate = found["density"] * flops / ranks / statistics.median(own)
        row = make_row(
            own,
            problem.query.dtype,
            benchmark=f"peers {what}",
            case=case,
            baseline=baseline,
            num_tasks=num_ranks,
            executor=name,
            ratio=seconds[baseline],
            details=found | {"tflops_per_rank": rate / 1e12},
        )
        if baseline == "one":
            row.details["efficiency"] = 1 / (row.ratio * ranks)
        rows.append(row)
    return rows
