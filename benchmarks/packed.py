"""Plans of packed documents: planning time, balance and bytes moved, by document lengths."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import add_common
from benchmarks.publish import make_row, publish
from benchmarks.timing import track
from cqs.executors.distributed.layout import Layout, ShardedWork, lay_out
from cqs.patterns import Pattern, documents
from cqs.report.measurement import Measurement
from cqs.scheduler import AttentionShape
from cqs.worker.work import make_work

_SHAPE = AttentionShape(32, 128, num_kv_heads=8)
"""Heads of a layer of Llama 3 8B."""
_TILE = 128

_CORPORA = json.loads(Path(__file__).with_name("corpora.json").read_text())
"""Lengths of documents in tokens, of public corpora for long contexts: upper end of an interval,
which begins where the one before ends, and its documents per million. From LongCA-bench
(github.com/NJUDeepEngine/LongCA-bench, ``dist_attn/distribution``)."""


class PackedSequence(NamedTuple):
    """Size of a packed sequence, and the ranks that share it."""

    tokens: int
    num_documents: int
    """Number of documents, unless a corpus determines it."""
    num_ranks: int


_CASES = (
    PackedSequence(2**17, 100, 8),
    PackedSequence(2**20, 2000, 8),
    PackedSequence(2**20, 2000, 64),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 20, out: str | None = None) -> None:
    """Plan packings that were never seen, and validate the last plan of each case.

    A repeat draws new documents and times one rank: live pairs, layout, routes, and the views of
    the kernels. The first repeat is not counted.

    Args:
        tokens: Length of the packed sequence on 8 ranks; ``None`` means the published cases.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.
    """
    cases = _CASES if tokens is None else (PackedSequence(tokens, max(tokens // 1024, 2), 8),)
    rows = [_measure(case, name, repeats) for case in cases for name in LENGTHS]
    columns: dict[str, Callable[[Measurement], object]] = {
        "lengths": lambda row: row.case.rpartition("-")[0],
        "tokens": lambda row: row.case.rpartition("-")[2],
        "ranks": lambda row: row.num_tasks,
        "documents": lambda row: f"{row.details['documents']:.0f}",
        "longest": lambda row: f"{row.details['longest']:.0f}",
        "degree": lambda row: f"{row.details['head_parallel']:.0f}",
        "best ms": lambda row: f"{row.details['best_ms']:.2f}",
        "median ms": lambda row: f"{row.median_ms:.2f}",
        "busiest / mean": lambda row: f"{row.details['balance']:.3f}",
        "without moves": lambda row: f"{row.details['balance_at_home']:.2f}",
        "bytes / all-gather": lambda row: f"{row.ratio:.3f}",
        "most": lambda row: f"{row.details['most_bytes']:.3f}",
    }
    publish(rows, columns, out)


def draw_uniform(case: PackedSequence, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return lengths of documents between random cuts."""
    cuts = generator.choice(case.tokens - 1, case.num_documents - 1, replace=False) + 1
    return np.diff([0, *np.sort(cuts), case.tokens])


def draw_one_long(case: PackedSequence, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return the lengths of one document of half of the tokens, among many short ones."""
    rest = case._replace(tokens=case.tokens // 2, num_documents=case.num_documents - 1)
    lengths = draw_uniform(rest, generator)
    place = int(generator.integers(len(lengths) + 1))
    return np.insert(lengths, place, case.tokens - rest.tokens)


def draw_corpus(
    case: PackedSequence, generator: np.random.Generator, corpus: str
) -> NDArray[np.int64]:
    """Return the lengths of documents of a corpus, in random order; the last one is cut off."""
    bounds, shares = np.array(_CORPORA[corpus]).T
    lows = np.append(1, bounds[:-1])
    lengths: list[int] = []
    while (left := case.tokens - sum(lengths)) > 0:
        chosen = generator.choice(len(shares), p=shares / shares.sum())
        low, high = np.log([lows[chosen], bounds[chosen]])
        lengths.append(min(int(np.exp(generator.uniform(low, high))), left))
    return generator.permutation(lengths)


LENGTHS: dict[str, Callable[..., NDArray[np.int64]]] = {
    "uniform": draw_uniform,
    "one-long": draw_one_long,
    **{name: partial(draw_corpus, corpus=name) for name in _CORPORA},
}
"""Functions that draw the lengths of the documents of a packed sequence."""


def plan_rank(pattern: Pattern, case: PackedSequence, rank: int) -> Layout:
    """Plan one rank of a training step, up to the pairs that its kernels compute."""
    marks = [case.tokens * i // case.num_ranks for i in range(case.num_ranks + 1)]
    shards = tuple(stop - start for start, stop in zip(marks, marks[1:], strict=False))
    bound = pattern.bind(case.tokens)
    options: Any = {"pattern": pattern, "tile": _TILE, "with_gradients": True}
    layout = lay_out(ShardedWork(shards, shards, _SHAPE, **options), rank)
    for route in layout.routes:
        _ = route.find_offsets(is_home=False), route.sends, route.stays
    make_work(layout.steps, bound, layout.query_route.held, layout.key_route.held)
    return layout


def moved_bytes(layout: Layout, shape: AttentionShape) -> int:
    """Return the bytes that all ranks send to others in a forward pass, without LSEs.

    Args:
        layout: The layout of one rank.
        shape: Heads, head dimensions, batch and element size of the shards.
    """
    part = layout.chunks[0].part(shape)
    output = part.batch * part.num_heads * part.value_columns * part.itemsize
    sent = output * layout.result_route.num_moved
    sent += part.query_bytes(layout.query_route.num_moved)
    return len(layout.chunks) * (sent + part.key_bytes(layout.key_route.num_moved))


def _measure(case: PackedSequence, name: str, repeats: int) -> Measurement:
    """Plan new packings and return their row."""
    generator = np.random.default_rng(0)
    seconds, found = [], []
    for repeat in track(range(repeats + 1), repeats + 1, f"{name}, {case.num_ranks} ranks"):
        lengths = LENGTHS[name](case, generator)
        pattern = documents(np.cumsum([0, *lengths]))
        start = time.perf_counter()
        layout = plan_rank(pattern, case, repeat % case.num_ranks)
        seconds.append(time.perf_counter() - start)
        found.append(_describe(layout, lengths))
    layout.plan.validate()
    worst = {key: max(each[key] for each in found) for key in found[0]}
    ratios = [each["most_bytes"] for each in found]
    return make_row(
        seconds[1:],
        "bfloat16",
        benchmark="packed",
        case=f"{name}-{case.tokens}",
        baseline="bytes of an all-gather",
        num_tasks=case.num_ranks,
        executor="plan of one rank",
        ratio=statistics.median(ratios),
        details={"best_ms": 1e3 * min(seconds), **worst},
    )


def _describe(layout: Layout, lengths: NDArray[np.int64]) -> dict[str, Any]:
    """Return the balance and the bytes moved of a plan, relative to an all-gather's."""
    plan = layout.plan
    placement = plan.placement
    at_home = np.diff(placement.documents.live_before(placement.marks))
    all_gather = (len(layout.key_route.shards) - 1) * _SHAPE.key_bytes(plan.seqlen_kv)
    return {
        "documents": float(len(lengths)),
        "longest": float(lengths.max()),
        "balance": placement.balance,
        "balance_at_home": float(at_home.max() / at_home.mean()),
        "head_parallel": float(len(layout.key_route.shards) // plan.num_tasks),
        "most_bytes": moved_bytes(layout, _SHAPE) / all_gather,
    }
