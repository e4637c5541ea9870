import math

import numpy as np
import pytest

from benchmarks.cover_search import least_size, search_cover
from benchmarks.singer_covers import prime_power, singer_cover, singer_order
from cqs.scheduler import load_interest_set
from cqs.scheduler.interest_sets import PERFECT_MODULI, prune_cover, ruler_cover


def count_differences(elements, modulus):
    """How often each residue is a difference of two elements."""
    elements = np.array(elements)
    differences = (elements[:, None] - elements[None, :]) % modulus
    return np.bincount(differences.ravel(), minlength=modulus)


@pytest.mark.parametrize("q", [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 27])
def test_singer_set_has_every_difference_exactly_once(q):
    cover = singer_cover(q * q + q + 1)
    counts = count_differences(cover, q * q + q + 1)
    assert counts[0] == len(cover) == q + 1
    assert (counts[1:] == 1).all()
    assert cover[:2] == (0, 1) and list(cover) == sorted(cover)


def test_orders_that_are_no_prime_power_have_no_cover():
    assert singer_order(43 * 43 + 43 + 1) == 43 and singer_order(43) is None
    with pytest.raises(ValueError, match="prime power, got 43$"):
        singer_cover(43)


def test_the_sets_of_projective_planes_are_stored_as_they_are_constructed():
    orders = {q for q in range(2, 32) if prime_power(q)}
    assert {1, 3, *(q * q + q + 1 for q in orders)} == set(PERFECT_MODULI)
    for q in [*orders - {2, 3, 4, 5, 7, 8, 9}, 64, 121]:
        modulus = q * q + q + 1
        assert load_interest_set(modulus) == singer_cover(modulus)


def test_every_number_with_a_projective_plane_has_a_perfect_set():
    for q in filter(prime_power, range(2, 512)):
        assert len(load_interest_set(q * q + q + 1)) == q + 1


def test_ruler_covers_every_modulus_with_few_elements():
    for modulus in range(1, 1101):
        cover = ruler_cover(modulus)
        assert count_differences(cover, modulus).all(), modulus
        assert len(cover) <= math.sqrt(1.5 * modulus) + 6, modulus
        assert cover[0] == 0 and list(cover) == sorted(set(cover)), modulus


@pytest.mark.parametrize(("modulus", "size"), [(7, 3), (13, 4), (31, 6)])
def test_search_finds_perfect_sets(modulus, size):
    cover = search_cover(modulus, size, seed=3)
    assert len(cover) == size and cover[0] == 0 and list(cover) == sorted(cover)
    assert count_differences(cover, modulus).all()
    assert search_cover(modulus, size, seed=3) == cover


def test_search_gives_up_where_no_cover_exists():
    assert search_cover(14, 4, max_moves=0) is None
    # 5 elements have up to 21 differences, enough for 20 by counting, yet no such cover exists.
    assert search_cover(20, 5, max_moves=2000) is None
    assert [least_size(q * q + q + 1) - q - 1 for q in range(2, 17)] == [
        int(q in (6, 10, 12, 14, 15)) for q in range(2, 17)
    ]


@pytest.mark.parametrize("modulus", [1, 2, 5, 12, 31, 100])
def test_pruning_keeps_a_cover_and_leaves_nothing_to_drop(modulus):
    kept = prune_cover(range(modulus), modulus)
    assert kept[0] == 0 and count_differences(kept, modulus).all()
    for element in kept[1:]:
        fewer = [other for other in kept if other != element]
        assert not count_differences(fewer, modulus).all()
