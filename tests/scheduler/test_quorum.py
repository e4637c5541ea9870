from itertools import chain

import numpy as np
import pytest

from cqs.scheduler import load_interest_set, owned_pairs, quorum, shared_pair

EVERY_NUM_WORKERS = range(1, 301)


def count_owners(num_tasks):
    """Who computes (query group, key group): how often by its first and by its second rows."""
    interest_set = load_interest_set(num_tasks)
    whole = np.zeros((num_tasks, num_tasks), dtype=int)
    first_half, second_half = np.zeros_like(whole), np.zeros_like(whole)
    for index in range(num_tasks):
        pairs = owned_pairs(index, interest_set, num_tasks)
        flat = np.fromiter(chain.from_iterable(pairs), dtype=int, count=2 * len(pairs))
        np.add.at(whole, (flat[::2], flat[1::2]), 1)
        if pair := shared_pair(index, interest_set, num_tasks):
            first_half[pair] += 1
            second_half[pair[::-1]] += 1
    return whole + first_half, whole + second_half


@pytest.mark.slow
def test_every_pair_of_groups_has_one_owner():
    for num_tasks in EVERY_NUM_WORKERS:
        for owners in count_owners(num_tasks):
            assert (owners == 1).all(), num_tasks


def test_every_task_owns_equally_many_pairs_and_its_diagonal():
    for num_tasks in range(1, 65):
        interest_set = load_interest_set(num_tasks)
        for index in range(num_tasks):
            pairs = owned_pairs(index, interest_set, num_tasks)
            halves = 2 if shared_pair(index, interest_set, num_tasks) else 0
            assert 2 * len(pairs) + halves == 2 * num_tasks
            assert [p for p, q in pairs if p == q] == [index]
            assert list(pairs) == sorted(pairs)


def test_tasks_own_only_pairs_that_they_hold():
    for num_tasks in range(1, 65):
        interest_set = load_interest_set(num_tasks)
        for index in range(num_tasks):
            held = set(quorum(index, interest_set, num_tasks))
            owned = set(chain.from_iterable(owned_pairs(index, interest_set, num_tasks)))
            shared = shared_pair(index, interest_set, num_tasks) or ()
            assert owned | set(shared) <= held


def test_pairs_are_shared_exactly_when_the_number_of_tasks_is_even():
    for num_tasks in EVERY_NUM_WORKERS:
        interest_set = load_interest_set(num_tasks)
        for index in range(num_tasks):
            pair = shared_pair(index, interest_set, num_tasks)
            assert (pair is None) == bool(num_tasks % 2)
            if pair:
                twin = (index + num_tasks // 2) % num_tasks
                assert shared_pair(twin, interest_set, num_tasks) == pair[::-1]
                assert (pair[1] - pair[0]) % num_tasks == num_tasks // 2


@pytest.mark.parametrize(
    ("num_tasks", "interest_set"),
    [(7, (0, 1, 3)), (7, (0, 1, 2, 3, 4, 5, 6)), (8, (0, 1, 2, 4)), (4, (0, 1, 2, 3))],
)
def test_quorums_are_the_interest_set_moved_on_and_any_two_groups_meet(num_tasks, interest_set):
    quorums = [set(quorum(w, interest_set, num_tasks)) for w in range(num_tasks)]
    for index, groups in enumerate(quorums):
        assert groups == {(a + index) % num_tasks for a in interest_set}
    for p in range(num_tasks):
        for q in range(num_tasks):
            assert any({p, q} <= groups for groups in quorums)


@pytest.mark.parametrize("num_tasks", [5, 6, 7, 8])
def test_a_wasteful_interest_set_owns_every_pair_once_too(num_tasks):
    everyone = tuple(range(num_tasks))
    owners = np.zeros((num_tasks, num_tasks))
    for index in range(num_tasks):
        for pair in owned_pairs(index, everyone, num_tasks):
            owners[pair] += 1
        if pair := shared_pair(index, everyone, num_tasks):
            owners[pair] += 0.5
            owners[pair[::-1]] += 0.5
    assert (owners == 1).all()
