"""A pattern of few bytes costs seconds at most, whatever it says: else it is an error."""

import time

import pytest

from cqs.patterns import bigbird, causal, documents
from cqs.patterns.text import parse_pattern
from cqs.scheduler import make_plan


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text", "seqlen"),
    [
        ("bigbird(block=1, random_blocks=1000000000)", 16384),
        ("bigbird(block=1)", 10**10),
        ("bigbird(block=1)", 2**62),
        ("global_tokens([*range(0, 1000000, 2)])", 10**6),
        ("documents([*range(0, 1000001)])", 10**6),
        ("documents([*range(0, 10000)], [*range(0, 10000)]) & documents([*range(0, 10000)])", 9999),
        ("from_mask(range(1000000000))", 16384),
        ("block_sparse([range(1000000000)], 1)", 16384),
        ("block_sparse([[1]], 1000000000)", 10**9),
        ("acsr([*range(0, 999999)], [*range(1, 1000000)], [*range(0, 999999)])", 999_999),
        ("causal() - bigbird()", 10**6),
        ("sliding_window(None, None) - bigbird(block=1, window_blocks=0)", 10**18),
        ("[" + ",".join(["*range(0, 1000000)"] * 15) + "]", 100),
    ],
    ids=range(13),
)
def test_what_would_take_too_much_is_refused_at_once(text, seqlen):
    start = time.process_time()
    with pytest.raises(ValueError, match="at most|by a star"):
        make_plan(seqlen, num_tasks=7, pattern=parse_pattern(text)).task(0)
    assert time.process_time() - start < 15


def test_many_documents_are_planned_within_seconds():
    start = time.process_time()
    plan = make_plan(10**6, num_tasks=64, pattern=documents(range(0, 10**6 + 1, 100)))
    assert plan.live_pairs == 10**4 * 5050
    assert sum(plan.task(worker).live_pairs for worker in range(64)) == plan.live_pairs
    assert time.process_time() - start < 15


@pytest.mark.slow
def test_long_sequences_keep_their_patterns():
    assert 0 < (bigbird() & causal()).bind(10**6).num_pairs < 10**9
