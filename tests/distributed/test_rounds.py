"""Long packets between hosts are sent in rounds, with the same results."""

import random

import pytest
from programs import bits_in_rounds
from random_problems import random_case

pytestmark = pytest.mark.slow


def draw(seed, num_ranks):
    """Return a random case, random shards of it and options."""
    generator = random.Random(seed)
    case = random_case(generator)
    cuts = [
        [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        for length in (case.seqlen_q, case.seqlen_kv)
    ]
    plan = generator.choice(["quorums", "rows", "grid"])
    return case, cuts, {"plan": plan, "num_chunks": generator.randint(1, 3)}


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_rounds_change_no_bit(ranks, num_ranks):
    problems = [draw(100 * num_ranks + i, num_ranks) for i in range(8)]
    for num_transfers, deviating in ranks.run(num_ranks, bits_in_rounds, problems):
        assert num_transfers > len(problems)
        assert deviating == []
