"""Routes: every token that a rank needs comes once, from whom it belongs to."""

import random

import pytest

from cqs.distributed.layout import choose_head_parallel, cut_shards, lay_out
from cqs.patterns import sliding_window


def random_lengths(total, num_ranks, generator):
    marks = sorted(generator.randint(0, total) for _ in range(num_ranks - 1))
    return tuple(b - a for a, b in zip([0, *marks], [*marks, total], strict=True))


@pytest.mark.parametrize("num_ranks", range(1, 14))
def test_every_token_needed_comes_once_from_its_shard(num_ranks):
    generator = random.Random(num_ranks)
    for _ in range(20):
        lengths = [random_lengths(generator.randint(0, 90), num_ranks, generator) for _ in range(2)]
        head_parallel = generator.choice([h for h in (1, 2, 3, 4) if num_ranks % h == 0])
        pattern = generator.choice([None, sliding_window(9, 4)])
        is_causal = pattern is None and generator.random() < 0.5
        layouts = [
            lay_out(
                *lengths,
                rank,
                num_heads=12,
                num_kv_heads=2,
                head_dim=16,
                head_parallel=head_parallel,
                num_stages=None,
                is_causal=is_causal,
                pattern=pattern,
                interest_set=None,
                tile=1,
            )
            for rank in range(num_ranks)
        ]
        for side, seqlens in zip(("of_queries", "of_keys"), lengths, strict=True):
            shards = cut_shards(seqlens)
            routes = [getattr(layout, side) for layout in layouts]
            for receiver, route in enumerate(routes):
                sent = [
                    shards[sender].start + row
                    for sender, each in enumerate(routes)
                    for rows in each.sends[receiver]
                    for row in rows
                ]
                assert sent == [token for tokens in route.held for token in tokens]
                assert list(route.receives) == [each.lengths[receiver] for each in routes]


def test_heads_of_a_slice_see_the_key_heads_that_are_theirs():
    options = {"is_causal": True, "pattern": None, "interest_set": None, "tile": 1, "head_dim": 16}
    for num_heads, num_kv_heads, head_parallel in ((8, 2, 4), (8, 8, 4), (12, 6, 2), (8, 1, 8)):
        for rank in range(8):
            layout = lay_out(
                (4,) * 8,
                (4,) * 8,
                rank,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_parallel=head_parallel,
                num_stages=1 + rank % 3,
                **options,
            )
            for stage in layout.stages:
                heads, kv_heads = stage.query_heads[rank], stage.kv_heads[rank]
                group_size = len(heads) // len(kv_heads)
                needed = [head * num_kv_heads // num_heads for head in heads]
                assert needed == [kv_heads[i // group_size] for i in range(len(heads))]


@pytest.mark.parametrize(("num_ranks", "head_parallel"), [(1, 1), (6, 1), (6, 2), (6, 6), (8, 4)])
def test_stages_have_every_head_once(num_ranks, head_parallel):
    layout = lay_out(
        (4,) * num_ranks,
        (4,) * num_ranks,
        0,
        num_heads=24,
        num_kv_heads=12,
        head_dim=16,
        head_parallel=head_parallel,
        num_stages=4,
        is_causal=False,
        pattern=None,
        interest_set=None,
        tile=1,
    )
    for side, number in (("query_heads", 24), ("kv_heads", 12)):
        found = [
            head
            for rank in range(head_parallel)
            for stage in layout.stages
            for head in getattr(stage, side)[rank]
        ]
        assert sorted(found) == list(range(number))


def test_stages_are_as_many_as_pay():
    def number(tokens, num_kv_heads, num_stages=None, num_ranks=4):
        layout = lay_out(
            (tokens // num_ranks,) * num_ranks,
            (tokens // num_ranks,) * num_ranks,
            0,
            num_heads=16,
            num_kv_heads=num_kv_heads,
            head_dim=128,
            head_parallel=num_ranks,
            num_stages=num_stages,
            is_causal=False,
            pattern=None,
            interest_set=None,
            tile=128,
        )
        return len(layout.stages)

    assert [number(tokens, 16) for tokens in (1024, 32768, 131072)] == [1, 2, 4]
    assert number(131072, 8) == 2 and number(131072, 4) == 1
    assert number(131072, 16, num_stages=3) == 2  # three do not divide four
    assert number(131072, 16, num_ranks=1) == 1


def test_heads_are_cut_where_that_spares_most():
    assert choose_head_parallel(8, 16, 16) == 8
    assert choose_head_parallel(7, 16, 16) == 1
    assert choose_head_parallel(8, 1, 1) == 1
    assert choose_head_parallel(6, 2, 2) == 2
