"""Random problems for every kind of plan, and random calls with every pair of options."""

import random
from itertools import combinations, product
from typing import Any, NamedTuple

from sparse_cases import NAMES, random_bits, with_pattern

from benchmarks.cases import Case
from cqs.patterns import causal, documents, from_mask, per_head, sliding_window, strided
from cqs.scheduler import Grid2D, Hosts, Quorums
from cqs.scheduler.head_groups import possible_head_parallel


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def kinds_of(num_tasks):
    """List all kinds of plans for a number of tasks, with the best known interest sets."""

    def flat(number):
        grids = [
            Grid2D(n, number // n, is_balanced=is_balanced)
            for n in divisors(number)
            for is_balanced in (True, False)
        ]
        return [Quorums(), *grids]

    two_levels = [
        Hosts(outer, size) for size in divisors(num_tasks) for outer in flat(num_tasks // size)
    ]
    return [*flat(num_tasks), *two_levels]


def random_case(generator):
    """Return a case of up to 90 tokens: causal, sparse or dense, with lengths that may differ."""
    seqlen_q = generator.choice([0, 1, 5, 40, 64, generator.randint(0, 90)])
    seqlen_kv = generator.choice([seqlen_q, seqlen_q, generator.randint(0, 90)])
    num_heads, num_kv_heads = generator.choice([(4, 4), (4, 2), (4, 1), (3, 3), (8, 2)])
    case = Case("random", seqlen_q, seqlen_kv, num_heads, num_kv_heads, head_dim=8)
    if min(seqlen_q, seqlen_kv) > 1 and generator.random() < 0.4:
        names = [name for name in NAMES if name != "acsr" or seqlen_kv >= seqlen_q]
        return with_pattern(case, generator.choice(names))
    return Case(**{**vars(case), "is_causal": generator.random() < 0.6})


def random_problem(generator, num_ranks):
    """Return a case, random shards of it, and options of ``cqs.distributed.attention``."""
    case = random_case(generator)
    degree = generator.choice(possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads))
    cuts = [
        [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        for length in (case.seqlen_q, case.seqlen_kv)
    ]
    if generator.random() < 0.1:
        links = 10 ** generator.uniform(3, 11), 10 ** generator.uniform(-6, -3)
        return case, cuts, {"links": links}
    plan = generator.choice(kinds_of(num_ranks // degree))
    return (
        case,
        cuts,
        {"head_parallel": degree, "plan": plan, "num_chunks": generator.randint(1, 3)},
    )


def random_problems(seed, number, num_ranks):
    generator = random.Random(seed)
    return [random_problem(generator, num_ranks) for _ in range(number)]


class Call(NamedTuple):
    """A call of ``cqs.distributed.attention``, of float64 tensors."""

    case: Case
    cuts: list[list[int]]
    """First query, and first key, of every rank's shard, and the end of the last."""
    options: dict[str, Any]
    terms: list[str] | None = None
    """Options of the scores; ``None`` draws some."""
    joint: tuple[str, int, int] = ("front", 0, 0)
    """Position and numbers of the joint queries and keys."""
    limit: int = 0
    """``max_bytes``, as a multiple of the smallest possible; 0 for none."""
    kind: str = "plain"


HEADS = [sliding_window(3, 2), causal(), strided(4), sliding_window(None, 1)]
MASKS = {
    "none": lambda q, k, batch, heads: None,
    "window": lambda q, k, batch, heads: sliding_window(5, 3),
    "documents": lambda q, k, batch, heads: documents([0, q // 3, q], [0, k // 2, k]),
    "of pairs": lambda q, k, batch, heads: from_mask(random_bits(q, k)),
    "of each head": lambda q, k, batch, heads: per_head([HEADS[:heads]]),
    "of two heads": lambda q, k, batch, heads: per_head([[HEADS[h // 2] for h in range(heads)]]),
    "of elements": lambda q, k, batch, heads: per_head([[HEADS[b % 2]] for b in range(batch)]),
    "of both": lambda q, k, batch, heads: per_head(
        [[HEADS[(b + h) // 2 % 4] for h in range(heads)] for b in range(batch)]
    ),
}
TERMS = "sinks", "softcap", "alibi_slopes", "bias", "score_mod"
VALUES = {
    "heads": [(4, 4), (4, 2), (4, 1)],
    "batch": [0, 1, 3],
    "lengths": [(20, 20), (11, 23), (23, 11)],
    "mask": list(MASKS),
    "is_causal": [False, True],
    "scale": [None, 0.3],
    "dropout_p": [0.0, 0.3],
    **dict.fromkeys(TERMS, [False, True]),
    "joint": ["none", "front", "rear"],
    "head_parallel": ["auto", 1, 2],
    "num_chunks": [None, 2],
    "plan": [None, "rows", "grid", "quorums"],
    "links": [None, (1e9, 1e-4)],
    "limit": [0, 1, 2],
    "backend": [None, "reference"],
    "verify": [False, True],
    "kind": ["plain", "prepared", "DTensor"],
}
"""Options of a call on ranks and their values."""
IMPOSSIBLE = {
    (("mask", f"of {one}"), ("head_parallel", 2)) for one in ("each head", "two heads", "both")
}


def calls_of_all_pairs(seed, num_ranks):
    """Return random calls in which each value of an option meets all values of all others."""
    generator, calls = random.Random(seed), []
    items = [[(name, value) for value in values] for name, values in VALUES.items()]
    pairs = {pair for sides in combinations(items, 2) for pair in product(*sides)} - IMPOSSIBLE
    while pairs:
        pair = min(pairs, key=str)
        draws = [
            {n: generator.choice(v) for n, v in VALUES.items()} | dict(pair) for _ in range(100)
        ]
        met = [{*combinations(draw.items(), 2)} for draw in draws]
        met, draw = max(
            (each for each in zip(met, draws, strict=True) if not each[0] & IMPOSSIBLE),
            key=lambda each: len(each[0] & pairs),
        )
        pairs -= met
        calls.append(_call_of(generator, num_ranks, **draw))
    return calls


def _call_of(
    generator,
    num_ranks,
    *,
    heads,
    batch,
    lengths,
    mask,
    is_causal,
    scale,
    joint,
    limit,
    kind,
    **given,
):
    pattern = MASKS[mask](*lengths, batch, heads[0])
    case = Case("pairs", *lengths, *heads, 8, batch, is_causal, pattern, scale)
    cuts = [
        [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        for length in lengths
    ]
    terms = [name for name in TERMS if given.pop(name)]
    if given["dropout_p"]:
        given["seed"] = generator.randrange(100)
    numbers = (0, 0) if joint == "none" else generator.choice([(3, 5), (0, 2), (4, 0)])
    joint = "front" if joint == "none" else joint, *numbers
    return Call(case, cuts, given, terms, joint, limit, kind)
