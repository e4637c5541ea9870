"""Computations that are timed in turn are timed alike."""

from itertools import pairwise, permutations

from benchmarks.timing import time_in_turn
from cqs.report.timing import Timer, run_in_turn


def orders_of(names, repeats):
    return [list(found) for found in run_in_turn(dict.fromkeys(names, int), repeats)]


def test_nothing_always_follows_the_same():
    orders = orders_of("abcd", 30)
    assert all(sorted(order) == list("abcd") for order in orders)
    following = {pair for order in orders for pair in pairwise(order)}
    assert following == set(permutations("abcd", 2))
    assert {order[0] for order in orders} == set("abcd")
    assert orders == orders_of("abcd", 30)  # on every rank


def test_each_is_timed_as_often_in_its_turn():
    calls = []
    computations = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = time_in_turn(computations, 5, Timer("cpu"))
    assert list(seconds) == list("abc") and all(len(each) == 5 for each in seconds.values())
    assert calls == [name for order in orders_of("abc", 5) for name in order]
