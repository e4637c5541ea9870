"""Random problems for every kind of plan."""

import math
import random

from programs import random_cuts
from sparse_cases import NAMES, with_pattern

from benchmarks.cases import Case
from cqs.patterns import documents
from cqs.scheduler import Documents, Grid2D, Hosts, Quorums
from cqs.scheduler.head_groups import possible_head_parallel

HEADS = [(4, 4), (4, 2), (4, 1), (3, 3), (8, 2)]
TOLERANCES = 0.0, 0.01, 0.3, math.inf


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
    num_heads, num_kv_heads = generator.choice(HEADS)
    case = Case("random", seqlen_q, seqlen_kv, num_heads, num_kv_heads, head_dim=8)
    if min(seqlen_q, seqlen_kv) > 1 and generator.random() < 0.4:
        names = [name for name in NAMES if name != "acsr" or seqlen_kv >= seqlen_q]
        return with_pattern(case, generator.choice(names))
    return Case(**{**vars(case), "is_causal": generator.random() < 0.6})


def random_ends(generator, length, number):
    """Return cumulative lengths of some empty, short and long documents."""
    last = generator.randint(2, length)
    return [0, *sorted(generator.randint(0, last) for _ in range(number - 1)), last]


def random_documents(generator, length):
    """Return packed documents of up to ``length`` tokens, and the lengths of a problem."""
    number = generator.randint(1, 12)
    ends, ends_kv = random_ends(generator, length, number), None
    if generator.random() < 0.3:
        ends_kv = random_ends(generator, length, number)
    pattern = documents(ends, ends_kv, is_causal=generator.random() < 0.7)
    return pattern, pattern.default_lengths


def random_packed_case(generator):
    pattern, lengths = random_documents(generator, 90)
    return Case("packed", *lengths, *generator.choice(HEADS), head_dim=8, pattern=pattern)


def random_problem(generator, num_ranks, is_packed=False):
    """Return a case, random shards of it, and options of ``cqs.distributed.attention``."""
    case = random_packed_case(generator) if is_packed else random_case(generator)
    degree = generator.choice(possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads))
    cuts = random_cuts(generator, (case.seqlen_q, case.seqlen_kv), num_ranks)
    if generator.random() < 0.1:
        links = 10 ** generator.uniform(3, 11), 10 ** generator.uniform(-6, -3)
        return case, cuts, {"links": links}
    kinds = kinds_of(num_ranks // degree)
    if is_packed:
        kinds = [Documents(tolerance=each) for each in TOLERANCES]
    options = {"head_parallel": degree, "plan": generator.choice(kinds)}
    return case, cuts, options | {"num_chunks": generator.randint(1, 3)}


def random_problems(seed, number, num_ranks, is_packed=False):
    generator = random.Random(seed)
    return [random_problem(generator, num_ranks, is_packed) for _ in range(number)]
