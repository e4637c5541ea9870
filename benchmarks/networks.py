"""Methods of context parallelism on hosts whose links are slow, made on this machine."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist

from benchmarks.hosts import INTERFACE, Hosts, link_bytes, why_not_hosts
from benchmarks.options import CAUSAL, add_common, add_passes
from benchmarks.peers import draw, measure
from benchmarks.publish import make_columns, publish
from cqs.commands.options import parse_integers
from cqs.executors.distributed.layout import ShardedWork, lay_out
from cqs.executors.distributed.transport.connections import probe_links, ranks_per_host
from cqs.problem import Problem, check_problem
from cqs.report.measurement import Measurement, append_rows
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import METHODS, predict
from cqs.scheduler.machines import MACHINES, SENT, Machine
from cqs.scheduler.workload import Workload

_HEADS = 8
_NUM_HOSTS = 4, 5, 7, 8, 12, 13, 16, 21, 31
_METHODS = "cqs,ring,all-gather,ulysses,ulysses in two,grid"
_TOKENS = 840
"""Number of tokens as default, rounded so that rings have equal chunks."""
_MANY_HOSTS = 20
"""Number of hosts from which the slower default rate is taken."""
_RATES = 10.0, 4.0
"""Megabits per second: the communication takes ten times as long as two cores need for the rest."""
_CORE_RATE = 30e9
"""FLOP/s of a core."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)
    parser.add_argument(
        "--hosts", type=parse_integers, metavar="H,H,...", help="default: as published"
    )
    parser.add_argument("--ranks-per-host", type=int, metavar="N", help="default: 1")
    parser.add_argument("--mbit", type=float, metavar="R", help="rate of a link; default: 10 or 4")
    parser.add_argument("--queue", choices=("fair", "plain"), help="of a link; default: fair")
    parser.add_argument("--kv-heads", type=parse_integers, metavar="H,H,...", help="default: 8,2")
    parser.add_argument("--head-dim", type=int, metavar="D", help="default: 64")
    add_passes(parser)
    parser.add_argument("--only", metavar="NAME,NAME", help=f"default: {_METHODS}")


def run(
    *,
    tokens: int | None = None,
    hosts: Sequence[int] = _NUM_HOSTS,
    ranks_per_host: int = 1,
    mbit: float | None = None,
    queue: str = "fair",
    kv_heads: Sequence[int] = (8, 2),
    head_dim: int = 64,
    causal: str = "both",
    backward: str = "yes",
    repeats: int = 3,
    only: str = _METHODS,
    out: str | None = None,
) -> None:
    """Verify and time methods on hosts in network namespaces, one process for each rank.

    Tensors are float32, with 8 heads. The rows have the bytes that a link sent, by the
    counters of its interface, and those that the plan of ``cqs`` promises. They also have the time
    that the cost model predicts from the measured links.

    Args:
        tokens: Sequence length; ``None`` means about 840.
        hosts: Numbers of hosts.
        ranks_per_host: Number of ranks of every host.
        mbit: Megabits per second of a link; ``None`` means 10, or 4 for more than 20 hosts.
        queue: ``"fair"`` for links that the hosts share fairly, ``"plain"`` for links with one
            first-in-first-out queue.
        kv_heads: Numbers of KV heads, 8 for as many as query heads.
        head_dim: Dimension of a head.
        causal: ``"yes"``, ``"no"`` or ``"both"``.
        backward: ``"yes"`` or ``"no"``: whether to time both passes too.
        repeats: Number of repeats.
        only: Names of methods, separated by commas.
        out: File to append rows to, or ``None``.

    Raises:
        ValueError: This machine cannot make hosts.
        RuntimeError: A rank failed.
    """
    if reason := why_not_hosts():
        raise ValueError(f"hosts cannot be made: {reason}")
    cases = [(number, is_causal) for number in kv_heads for is_causal in CAUSAL[causal]]
    for number in hosts:
        rate = mbit or _RATES[number > _MANY_HOSTS]
        chunks = 2 * number * ranks_per_host
        length = tokens or chunks * max(_TOKENS // chunks, 1)
        with Hosts([rate] * number, ranks_per_host, is_fair=queue == "fair") as network:
            network.run(
                _measure,
                (length, head_dim),
                cases,
                backward == "yes",
                repeats,
                only.split(","),
                {"mbit": rate, "is_fair": queue == "fair"},
                out,
            )


def _measure(
    size: tuple[int, int],
    cases: Sequence[tuple[int, bool]],
    with_gradients: bool,
    repeats: int,
    names: Sequence[str],
    links: dict[str, float],
    out: str | None,
) -> None:
    """Measure all cases on one rank; ``size`` is the number of tokens and ``head_dim``."""
    dist.init_process_group("gloo")
    rows: list[Measurement] = []
    for kv_heads, is_causal in cases:
        drawn = draw(size[0], _HEADS, kv_heads, size[1], torch.device("cpu"))
        problem = check_problem(*drawn[:3], is_causal=is_causal)
        found = measure(
            dist.group.WORLD,
            names,
            problem,
            drawn[3] if with_gradients else None,
            repeats=repeats,
            count_bytes=lambda: link_bytes(INTERFACE),
        )
        for what in ("forward", "both")[: 1 + with_gradients]:
            promised = _promise(problem, with_gradients=what == "both")
            for row in found:
                if row.benchmark.endswith(what):
                    row.details.update(links, **_predict(row.executor, problem, what))
                    row.details.update(promised if row.executor == "cqs" else {})
        append_rows(found, out)
        rows += found
    if rows:
        publish(rows, make_columns("predicted_ms", "link_bytes", "promised_bytes"), None)
    dist.destroy_process_group()


def _hosts() -> Machine:
    """Return the machine that cqs plans for: CPUs with the measured links."""
    links = probe_links(dist.group.WORLD, torch.device("cpu"))
    return replace(
        MACHINES["CPU"],
        devices_per_node=ranks_per_host(dist.group.WORLD),
        between=links.bandwidth,
        latency=links.latency,
    )


def _predict(method: str, problem: Problem, passes: str) -> dict[str, float]:
    """Return the predicted milliseconds of a method, if the cost model has it."""
    if method not in METHODS:
        return {}
    workload, number = (
        Workload(problem.query.shape[2], problem.shape, problem.is_causal),
        dist.get_world_size(),
    )
    rate = _CORE_RATE * (os.cpu_count() or 1) / number  # the ranks share the cores
    machine = replace(_hosts(), rate=rate, backward_rate=rate, per_row=0.0)
    found = predict(method, workload, number, machine, passes, plan="any")
    return {} if found is None else {"predicted_ms": 1e3 * found.seconds}


def _promise(problem: Problem, *, with_gradients: bool) -> dict[str, float]:
    """Return the bytes that links carry by the plan of cqs, see :func:`promise`."""
    seqlen = problem.query.shape[2]
    options = {"is_causal": problem.is_causal, "with_gradients": with_gradients}
    return promise(seqlen, dist.get_world_size(), problem.shape, _hosts(), **options)


def promise(
    seqlen: int,
    num_ranks: int,
    shape: AttentionShape,
    machine: Machine,
    *,
    is_causal: bool,
    with_gradients: bool,
) -> dict[str, float]:
    """Return the bytes that links carry by the plan of cqs.

    Args:
        seqlen: Number of tokens, of which ranks have equal shards.
        num_ranks: Number of ranks.
        shape: Heads of the problem.
        machine: The hosts, with ``devices_per_node`` ranks each.
        is_causal: Whether attention is causal.
        with_gradients: Whether to count the backward pass too.

    Returns:
        What a host sends, as a mean and as the most; and "busiest_bytes", the most that a link
        carries in one direction in the forward pass, plus the same of the backward pass.
    """
    marks = [seqlen * rank // num_ranks for rank in range(num_ranks + 1)]
    lengths = tuple(b - a for a, b in pairwise(marks))
    per_host = int(machine.devices_per_node)
    # Bytes of every host: sent and received, forward, and sent and received, backward.
    carried = torch.zeros(num_ranks // per_host, 2, 2, dtype=torch.float64)
    work = ShardedWork(
        *(lengths, lengths, shape, is_causal),
        chunk_rule=SENT,
        machine=machine,
        with_gradients=with_gradients,
    )
    for rank in range(num_ranks):
        layout = lay_out(work, rank)
        heads, kv_heads = (sum(len(chunk.heads[i][0]) for chunk in layout.chunks) for i in (0, 1))
        queries, keys = heads * shape.head_dim * 4, 2 * kv_heads * shape.head_dim * 4
        merged = queries + (0 if layout.is_final else heads * 4)
        with_output = queries + (0 if layout.is_final else merged)

        def away(numbers: Sequence[int], host: int = rank // per_host) -> int:
            return sum(n for other, n in enumerate(numbers) if other // per_host != host)

        routes = layout.query_route, layout.key_route, layout.result_route
        # Inputs follow a route, and what a rank computes returns along it.
        (q_out, q_in), (k_out, k_in), (r_out, r_in) = (
            (away(route.lengths), away(route.receives)) for route in routes
        )
        forward = q_out * queries + k_out * keys + r_in * merged
        received = q_in * queries + k_in * keys + r_out * merged
        backward = received_backward = 0
        if with_gradients:
            backward = q_out * with_output + q_in * queries + k_in * keys
            received_backward = q_in * with_output + q_out * queries + k_out * keys
        carried[rank // per_host] += torch.tensor(
            [[forward, received], [backward, received_backward]], dtype=torch.float64
        )
    sent = carried[:, :, 0].sum(1)
    return {
        "promised_bytes": float(sent.mean()),
        "most_promised_bytes": float(sent.max()),
        "busiest_bytes": float(carried.amax((0, 2)).sum()),
    }
