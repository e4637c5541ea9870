"""Joint tokens give the attention of the whole sequence, wherever their rows are computed."""

import random

import pytest
from joint_programs import largest_joint_errors

from benchmarks.cases import Case
from cqs.scheduler.cost_model import possible_head_parallel

pytestmark = pytest.mark.slow

CASES = (
    Case("square", 47, 47, 4, 4, head_dim=8, batch=2),
    Case("gqa", 47, 47, 4, 2, head_dim=8),
    Case("causal", 47, 47, 4, 1, head_dim=8, is_causal=True),
    Case("cross", 40, 61, 4, 2, head_dim=8),
    Case("few", 6, 6, 2, 2, head_dim=8),
)
JOINT = {"few": (3, 3), "none": (0, 0), "many": (5, 5), "keys": (None, 4), "queries": (3, None)}


def cut(lengths, num_ranks, seed):
    """Cut both sides at random: some shards are empty."""
    generator = random.Random(seed)
    return [
        [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        for length in lengths
    ]


def problems_of(case, num_ranks):
    degrees = ["auto", *possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads)]
    for seed, (joint, position) in enumerate(
        (joint, position) for joint in JOINT.values() for position in ("front", "rear")
    ):
        lengths = case.seqlen_q - (joint[0] or 0), case.seqlen_kv - (joint[1] or 0)
        options = {"head_parallel": degrees[seed % len(degrees)], "num_chunks": 1 + seed % 2}
        yield case, cut(lengths, num_ranks, seed), joint, position, options


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_every_world_is_exact(ranks, num_ranks, case):
    problems = [*problems_of(case, num_ranks)]
    for errors in ranks.run(num_ranks, largest_joint_errors, problems):
        assert max(errors) < 1e-10
