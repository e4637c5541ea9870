from itertools import chain

import numpy as np
import pytest

from cqs.scheduler import load_interest_set, owned_pairs, quorum, shared_pair

EVERY_NUM_WORKERS = range(1, 301)


def count_owners(num_workers):
    """Who computes (query group, key group): how often by its first and by its second rows."""
    interest_set = load_interest_set(num_workers)
    whole = np.zeros((num_workers, num_workers), dtype=int)
    first_half, second_half = np.zeros_like(whole), np.zeros_like(whole)
    for worker in range(num_workers):
        pairs = owned_pairs(worker, interest_set, num_workers)
        flat = np.fromiter(chain.from_iterable(pairs), dtype=int, count=2 * len(pairs))
        np.add.at(whole, (flat[::2], flat[1::2]), 1)
        if pair := shared_pair(worker, interest_set, num_workers):
            first_half[pair] += 1
            second_half[pair[::-1]] += 1
    return whole + first_half, whole + second_half


def test_every_pair_of_groups_has_one_owner():
    for num_workers in EVERY_NUM_WORKERS:
        for owners in count_owners(num_workers):
            assert (owners == 1).all(), num_workers


def test_every_worker_owns_equally_many_pairs_and_its_diagonal():
    for num_workers in range(1, 65):
        interest_set = load_interest_set(num_workers)
        for worker in range(num_workers):
            pairs = owned_pairs(worker, interest_set, num_workers)
            halves = 2 if shared_pair(worker, interest_set, num_workers) else 0
            assert 2 * len(pairs) + halves == 2 * num_workers
            assert [p for p, q in pairs if p == q] == [worker]
            assert list(pairs) == sorted(pairs)


def test_workers_own_only_pairs_that_they_hold():
    for num_workers in range(1, 65):
        interest_set = load_interest_set(num_workers)
        for worker in range(num_workers):
            held = set(quorum(worker, interest_set, num_workers))
            owned = set(chain.from_iterable(owned_pairs(worker, interest_set, num_workers)))
            shared = shared_pair(worker, interest_set, num_workers) or ()
            assert owned | set(shared) <= held


def test_pairs_are_shared_exactly_when_the_number_of_workers_is_even():
    for num_workers in EVERY_NUM_WORKERS:
        interest_set = load_interest_set(num_workers)
        for worker in range(num_workers):
            pair = shared_pair(worker, interest_set, num_workers)
            assert (pair is None) == bool(num_workers % 2)
            if pair:
                twin = (worker + num_workers // 2) % num_workers
                assert shared_pair(twin, interest_set, num_workers) == pair[::-1]
                assert (pair[1] - pair[0]) % num_workers == num_workers // 2


@pytest.mark.parametrize(
    ("num_workers", "interest_set"),
    [(7, (0, 1, 3)), (7, (0, 1, 2, 3, 4, 5, 6)), (8, (0, 1, 2, 4)), (4, (0, 1, 2, 3))],
)
def test_quorums_are_the_interest_set_moved_on_and_any_two_groups_meet(num_workers, interest_set):
    quorums = [set(quorum(w, interest_set, num_workers)) for w in range(num_workers)]
    for worker, groups in enumerate(quorums):
        assert groups == {(a + worker) % num_workers for a in interest_set}
    for p in range(num_workers):
        for q in range(num_workers):
            assert any({p, q} <= groups for groups in quorums)


@pytest.mark.parametrize("num_workers", [5, 6, 7, 8])
def test_a_wasteful_interest_set_owns_every_pair_once_too(num_workers):
    everyone = tuple(range(num_workers))
    owners = np.zeros((num_workers, num_workers))
    for worker in range(num_workers):
        for pair in owned_pairs(worker, everyone, num_workers):
            owners[pair] += 1
        if pair := shared_pair(worker, everyone, num_workers):
            owners[pair] += 0.5
            owners[pair[::-1]] += 0.5
    assert (owners == 1).all()
