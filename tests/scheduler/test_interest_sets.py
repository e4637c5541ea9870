import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cover_search import least_size, search_cover
from benchmarks.singer_covers import prime_power, singer_cover, singer_order
from cqs.scheduler import (
    AttentionShape,
    Quorums,
    check_interest_set,
    interest_sets,
    load_interest_set,
    make_plan,
)
from cqs.scheduler.interest_set_costs import choose_interest_set, compare_interest_sets
from cqs.scheduler.interest_sets import (
    PERFECT_MODULI,
    load_interest_sets,
    prune_cover,
    read_interest_sets,
    ruler_cover,
)
from cqs.scheduler.quorum import shared_pair

FOLDER = Path(__file__).resolve().parents[2] / "interest_sets"
STORED = sorted(int(path.stem) for path in FOLDER.glob("*.txt"))


def read_stored(num_tasks):
    lines = (FOLDER / f"{num_tasks}.txt").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def covers(elements, modulus):
    """Return whether sorted numbers from 0 have every difference."""
    elements, is_covered = np.array(elements), np.zeros(modulus, dtype=bool)
    is_covered[(elements[:, None] - elements) % modulus] = True
    return elements[0] == 0 and (np.diff(elements) > 0).all() and is_covered.all()


@pytest.fixture
def stored_as(tmp_path, monkeypatch):
    """Replace the folder of stored sets by one that holds a single text for 7 tasks."""

    def store(text):
        (tmp_path / "7.txt").write_text(text)
        monkeypatch.setattr(interest_sets, "_FOLDERS", (tmp_path,))
        load_interest_sets.cache_clear()

    yield store
    load_interest_sets.cache_clear()


def test_stored_sets_are_sorted_covers_with_zero_and_are_loaded_as_they_stand():
    for num_tasks in STORED:
        all_stored = read_stored(num_tasks)
        for stored in all_stored:
            assert covers(stored, num_tasks) and stored[-1] < num_tasks, num_tasks
        assert len({*all_stored}) == len(all_stored) and len({*map(len, all_stored)}) == 1
        assert load_interest_sets(num_tasks) == tuple(all_stored)
        assert load_interest_set(num_tasks) == all_stored[0]


def test_all_published_sets_are_stored():
    numbers = [len(read_stored(num_tasks)) for num_tasks in range(3, 112)]
    assert sum(numbers) == 859 and max(numbers) == 20 and sum(n > 1 for n in numbers) == 49


@pytest.mark.slow
@pytest.mark.parametrize("num_tasks", [1, 2, 133, 183, 301, 307, 1009, 10**4, 65793, 259591, 2**18])
def test_a_number_without_a_stored_set_gets_a_cover_within_seconds(num_tasks):
    start = time.process_time()
    loaded = load_interest_set(num_tasks)
    assert time.process_time() - start < 10
    assert covers(loaded, num_tasks)
    assert len(loaded) <= math.sqrt(1.5 * num_tasks) + 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1 2", r"7\.txt, line 1: .*no two elements differ by 3"),
        ("0 1 three", r"7\.txt, line 1: .*'three'"),
        ("0 1 3\n0 1 2", r"7\.txt, line 2: .*no two elements differ by 3"),
        ("", r"7\.txt has no interest set"),
    ],
)
def test_a_damaged_file_is_refused(stored_as, text, message):
    stored_as(text)
    with pytest.raises(ValueError, match=message):
        load_interest_set(7)


def test_files_of_the_published_format_are_used(stored_as, tmp_path):
    stored_as("0 2 3\n\n0, 1, 3\n")
    assert load_interest_set(7) == (0, 2, 3)
    assert read_interest_sets(tmp_path / "7.txt", 7) == [(0, 2, 3), (0, 1, 3)]


def test_check_sorts_covers_and_names_the_smallest_difference_that_is_missed():
    assert check_interest_set(iter([3, 0, 1]), 7) == (0, 1, 3)
    for num_tasks, size in itertools.product([3, 7, 12, 31, 64], range(1, 4)):
        elements = tuple(range(size))
        if covers(elements, num_tasks):
            assert check_interest_set(elements, num_tasks) == elements
        else:
            with pytest.raises(ValueError, match=f"no two elements differ by {size}$"):
                check_interest_set(elements, num_tasks)


@pytest.mark.slow
def test_large_sets_are_checked_within_seconds():
    start = time.process_time()
    with pytest.raises(ValueError, match="no two elements differ by 1$"):
        check_interest_set(range(0, 8192, 2), 2**18)
    whole = check_interest_set(range(4096), 4096)
    assert shared_pair(0, whole, 4096) == (0, 2048)
    assert time.process_time() - start < 10


A283297 = """
    1 2 2 3 3 3 3 4 4 4 4 4 4 5 5 5 5 5 5 6 5 6 6 6 6 6 6 6 7 7 6 7 7 7 7 7 7 8 7 8 8 8 8 8 8 8
    8 8 8 8 8 9 9 9 9 9 8 9 9 9 9 9 9 9 9 10 10 10 10 10 10 10 9 10 10 10 10 10 10 11 11 11 11
    11 11 11 11 11 11 11 10 11 12 12 12 12 12 12 12 12
"""
"""Sizes of the smallest covers of 1 to 100, by https://oeis.org/A283297."""
PUBLISHED = {128: 13, 256: 20, 120: 14, 168: 16, 255: 20, 288: 21}
"""Sizes of Burkhardt and Karkkainen (2003), and of Bose with a cover of the multiples of q + 1."""


def test_no_published_cover_is_smaller():
    sizes = {number: len(load_interest_set(number)) for number in range(1, 301)}
    published = dict(enumerate(map(int, A283297.split()), 1))
    larger = {number for number in published if published[number] > sizes[number]}
    assert len(published) == 100 and larger == {93, 95}
    assert all(published[number] == sizes[number] for number in published.keys() - larger)
    assert all(sizes[number] <= size for number, size in PUBLISHED.items())
    assert all(sizes[number] <= len(ruler_cover(number)) for number in range(112, 301))
    assert all(least_size(number) <= size for number, size in sizes.items())


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_chosen_set_has_the_least_of_all(is_causal):
    shape = AttentionShape(4, 32, num_kv_heads=2)
    for num_tasks, seqlen in ((4, 97), (9, 1000), (14, 97)):
        problem = make_plan(seqlen, num_tasks=num_tasks, is_causal=is_causal), shape
        costs = compare_interest_sets(*problem)
        assert [each.interest_set for each in costs] == [*load_interest_sets(num_tasks)]
        for by in ("traffic", "memory"):
            chosen = choose_interest_set(*problem, by=by)
            (of_chosen,) = (each for each in costs if each.interest_set == chosen)
            assert getattr(of_chosen, by) == min(getattr(each, by) for each in costs)
        for each in costs:
            kind = Quorums(each.interest_set)
            plan = make_plan(seqlen, num_tasks=num_tasks, is_causal=is_causal, kind=kind)
            assert each.longest == max(task.held_tokens for task in plan.tasks)
    with pytest.raises(ValueError, match="by must be 'traffic' or 'memory', got 'time'"):
        choose_interest_set(make_plan(7, num_tasks=7), by="time")


def test_the_sets_of_projective_planes_are_stored_as_they_are_constructed():
    orders = {q for q in range(2, 32) if prime_power(q)}
    assert {1, 3, *(q * q + q + 1 for q in orders)} == set(PERFECT_MODULI)
    for q in [*orders - {2, 3, 4, 5, 7, 8, 9}, 64, 121]:
        assert load_interest_set(q * q + q + 1) == singer_cover(q * q + q + 1)


def test_every_number_with_a_projective_plane_has_a_perfect_set():
    for q in filter(prime_power, range(2, 512)):
        assert len(load_interest_set(q * q + q + 1)) == q + 1
    assert singer_order(43 * 43 + 43 + 1) == 43 and singer_order(43) is None
    with pytest.raises(ValueError, match="prime power, got 43$"):
        singer_cover(43)


def test_ruler_covers_every_modulus_with_few_elements():
    for modulus in range(1, 1101):
        cover = ruler_cover(modulus)
        assert covers(cover, modulus), modulus
        assert len(cover) <= math.sqrt(1.5 * modulus) + 6, modulus


def test_search_finds_perfect_sets_and_gives_up_where_no_cover_exists():
    for modulus, size in ((7, 3), (13, 4), (31, 6)):
        cover = search_cover(modulus, size, seed=3)
        assert len(cover) == size and covers(cover, modulus)
        assert search_cover(modulus, size, seed=3) == cover
    assert search_cover(14, 4, max_moves=0) is None
    # 5 elements have up to 21 differences, enough for 20 by counting, yet no such cover exists.
    assert search_cover(20, 5, max_moves=2000) is None
    assert [least_size(q * q + q + 1) - q - 1 for q in range(2, 17)] == [
        int(q in (6, 10, 12, 14, 15)) for q in range(2, 17)
    ]


@pytest.mark.parametrize("modulus", [1, 2, 5, 12, 31, 100])
def test_pruning_keeps_a_cover_and_leaves_nothing_to_drop(modulus):
    kept = prune_cover(range(modulus), modulus)
    assert covers(kept, modulus)
    for element in kept[1:]:
        assert not covers([other for other in kept if other != element], modulus)
