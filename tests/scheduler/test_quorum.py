from collections import Counter

import pytest

from cqs.scheduler import load_interest_set, owned_pairs, quorum, shared_pair

SETS = [(num_tasks, load_interest_set(num_tasks)) for num_tasks in range(1, 65)]
SETS += [(num_tasks, tuple(range(num_tasks))) for num_tasks in (5, 6, 7, 8)]  # with all groups
SETS += [(7, (0, 2, 3)), (8, (0, 1, 2, 4))]
SETS += [(num_tasks, load_interest_set(num_tasks)) for num_tasks in (133, 200)]


@pytest.mark.slow
def test_every_task_owns_equally_many_pairs_and_its_diagonal():
    """And each pair of groups has one owner, or two that share it by halves."""
    for num_tasks, interest_set in SETS:
        halves = Counter()
        for index in range(num_tasks):
            pairs = owned_pairs(index, interest_set, num_tasks)
            shared = shared_pair(index, interest_set, num_tasks)
            assert 2 * len(pairs) + (2 if shared else 0) == 2 * num_tasks
            assert [p for p, q in pairs if p == q] == [index]
            assert list(pairs) == sorted(pairs)
            held = quorum(index, interest_set, num_tasks)
            assert {*held} == {(a + index) % num_tasks for a in interest_set}
            assert {group for pair in (*pairs, shared or ()) for group in pair} <= {*held}
            halves.update({pair: 2 for pair in pairs})
            halves.update([shared, shared[::-1]] if shared else [])
        assert len(halves) == num_tasks**2 and {*halves.values()} == {2}, num_tasks


def test_pairs_are_shared_exactly_when_the_number_of_tasks_is_even():
    for num_tasks, interest_set in SETS:
        for index in range(num_tasks):
            pair = shared_pair(index, interest_set, num_tasks)
            assert (pair is None) == bool(num_tasks % 2)
            if pair:
                twin = (index + num_tasks // 2) % num_tasks
                assert shared_pair(twin, interest_set, num_tasks) == pair[::-1]
                assert (pair[1] - pair[0]) % num_tasks == num_tasks // 2
