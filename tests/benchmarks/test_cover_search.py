import pytest

from benchmarks.cover_search import search_cover
from cqs.scheduler.difference_covers import missing_differences


@pytest.mark.parametrize(("modulus", "size"), [(7, 3), (13, 4), (31, 6)])
def test_search_finds_perfect_sets(modulus, size):
    cover = search_cover(modulus, size)
    assert len(cover) == size and cover[0] == 0 and list(cover) == sorted(cover)
    assert not missing_differences(cover, modulus)


def test_search_repeats_itself_for_a_seed():
    assert search_cover(31, 6, seed=3) == search_cover(31, 6, seed=3)


@pytest.mark.parametrize(
    ("modulus", "size"), [(14, 4), (8, 3), (3, 4)], ids=["too-few", "barely-too-few", "too-many"]
)
def test_search_gives_up_at_once_on_sizes_that_cannot_be(modulus, size):
    assert search_cover(modulus, size, max_moves=0) is None


def test_search_gives_up_where_no_cover_exists():
    # 5 elements have up to 21 differences, enough for 20 by counting, yet no such cover exists.
    assert search_cover(20, 5, max_moves=2000) is None
