import math

import numpy as np
import pytest

from benchmarks.cover_search import search_cover
from benchmarks.singer_covers import prime_power, singer_cover, singer_order
from cqs.scheduler import load_interest_set
from cqs.scheduler.interest_sets import (
    PERFECT_MODULI,
    missing_differences,
    prune_cover,
    ruler_cover,
)

ORDERS = [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 27]


def count_differences(elements, modulus):
    """How often each residue is a difference of two elements."""
    elements = np.array(elements)
    differences = (elements[:, None] - elements[None, :]) % modulus
    return np.bincount(differences.ravel(), minlength=modulus)


@pytest.mark.parametrize("q", ORDERS)
def test_singer_set_has_every_difference_exactly_once(q):
    cover = singer_cover(q * q + q + 1)
    counts = count_differences(cover, q * q + q + 1)
    assert counts[0] == len(cover) == q + 1
    assert (counts[1:] == 1).all()
    assert cover[:2] == (0, 1) and list(cover) == sorted(cover)


@pytest.mark.parametrize("modulus", [1, 8, 43, 111, 132, 1000])
def test_singer_refuses_other_moduli(modulus):
    with pytest.raises(ValueError, match=f"prime power, got {modulus}$"):
        singer_cover(modulus)


def test_singer_order_knows_exactly_the_moduli_of_prime_powers():
    prime_powers = {p**k for p in range(2, 50) for k in range(1, 9) if is_prime(p)}
    expected = {q * q + q + 1: q for q in prime_powers}
    for modulus in range(1, 2000):
        assert singer_order(modulus) == expected.get(modulus)


def test_the_sets_of_projective_planes_are_stored_as_they_are_constructed():
    orders = {q for q in range(2, 32) if prime_power(q)}
    assert {1, 3, *(q * q + q + 1 for q in orders)} == set(PERFECT_MODULI)
    for q in [*orders - {2, 3, 4, 5, 7, 8, 9}, 64, 121, 256]:
        modulus = q * q + q + 1
        assert load_interest_set(modulus) == singer_cover(modulus)


@pytest.mark.parametrize("q", [q for q in range(2, 512) if prime_power(q)])
def test_every_number_with_a_projective_plane_has_a_perfect_set(q):
    assert len(load_interest_set(q * q + q + 1)) == q + 1


def is_prime(number):
    return number > 1 and all(number % divisor for divisor in range(2, number))


def test_prime_power_is_recognised_and_taken_apart():
    expected = {p**k: (p, k) for p in range(2, 1100) for k in range(1, 11) if is_prime(p)}
    for number in range(2, 1100):
        assert prime_power(number) == expected.get(number)


def test_ruler_covers_every_modulus_with_few_elements():
    for modulus in range(1, 1101):
        cover = ruler_cover(modulus)
        assert count_differences(cover, modulus).all(), modulus
        assert len(cover) <= math.sqrt(1.5 * modulus) + 6, modulus
        assert cover[0] == 0 and list(cover) == sorted(set(cover)), modulus


@pytest.mark.parametrize(("modulus", "size"), [(7, 3), (13, 4), (31, 6)])
def test_search_finds_perfect_sets(modulus, size):
    cover = search_cover(modulus, size)
    assert len(cover) == size and cover[0] == 0 and list(cover) == sorted(cover)
    assert count_differences(cover, modulus).all()


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


@pytest.mark.parametrize("modulus", [1, 2, 5, 12, 31, 100])
def test_pruning_keeps_a_cover_and_leaves_nothing_to_drop(modulus):
    kept = prune_cover(range(modulus), modulus)
    assert kept[0] == 0 and count_differences(kept, modulus).all()
    for element in kept[1:]:
        fewer = [other for other in kept if other != element]
        assert not count_differences(fewer, modulus).all()


def test_missing_differences_are_those_that_no_two_elements_have():
    for modulus in range(1, 40):
        for cover in [(0,), (0, 1), (0, 1, 5), (3, 8, 9)]:
            counts = count_differences(cover, modulus)
            assert missing_differences(cover, modulus) == np.flatnonzero(counts == 0).tolist()
