"""What callers must not do is an error on every rank, soon, and never a wrong result."""

import pytest
from programs import (
    KINDS,
    calls_of_threads_in_turn,
    check_asynchronous,
    complaint_about_group,
    complaint_about_kind,
    complaint_in_vmap,
    complaint_on_another_device,
    complaint_out_of_order,
    complaint_without_the_last,
    kept_without_a_collection,
    outcomes_of_steps,
    outcomes_of_threads,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_threads_that_share_a_group_get_an_error(ranks, pass_):
    """No process ends, and no rank whose threads overlap is left without an error."""
    for rank, found in enumerate(ranks.run(8, outcomes_of_threads, 1, pass_)):
        outcomes = [outcome for of_thread in found for outcome in of_thread]
        errors = [outcome for outcome in outcomes if outcome not in ("right", "wrong")]
        if pass_ == "forward":
            assert all(of_thread[-1] in errors for of_thread in found)
        else:
            assert "wrong" not in outcomes and (errors or rank == 0)
        for error, text in errors:
            assert error in (RuntimeError, ValueError)
            assert "group must be used by one thread at a time" in text


@pytest.mark.parametrize("kind", ["a mask", "gradients"])
def test_threads_do_not_interleave_the_messages_of_a_call(ranks, kind):
    """Requests and what follows them are one call."""
    for found in ranks.run(8, outcomes_of_steps, kind):
        assert set(found) == {"first", "second"}
        for error, text in found.values():
            assert error is RuntimeError and "group must be used by one thread at a time" in text


def test_threads_may_call_on_groups_of_their_own(ranks):
    for pass_ in ("forward", "backward"):
        for found in ranks.run(8, outcomes_of_threads, 2, pass_):
            assert found == (["right"] * 3, ["right"] * 3)


def test_threads_may_call_one_after_another(ranks):
    assert ranks.run(3, calls_of_threads_in_turn) == [[True] * 3] * 3


def test_backward_passes_in_another_order_are_named(ranks):
    for error, text in ranks.run(8, complaint_out_of_order, 2):
        assert error is ValueError
        assert text.startswith("rank 7 of the group has call 'the backward pass of call 1', rank 0")
        assert text.endswith("has 'the backward pass of call 0'")


def test_a_rank_that_does_not_call_is_not_waited_for_beyond_the_timeout(ranks):
    *found, last = ranks.run(8, complaint_without_the_last, 2)
    assert last is None
    for error, text in found:
        assert error is RuntimeError and "a rank of the group has failed" in text


def test_a_finished_call_keeps_neither_tensors_nor_its_group(ranks):
    """Threads of a group that is destroyed late abort the interpreter as it exits."""
    assert ranks.run(8, kept_without_a_collection) == [[]] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_plain_memory_are_named_on_every_rank(ranks, kind):
    expected = NotImplementedError if kind == "meta" else TypeError
    for error, text, seconds in ranks.run(3, complaint_about_kind, kind, range(3)):
        assert error is expected and "query" in text and seconds < 5
        assert kind != "DTensor" or "query.to_local()" in text
    found = ranks.run(3, complaint_about_kind, kind, [1])
    assert found.pop(1)[0] is expected
    for error, text, seconds in found:
        assert error is ValueError and seconds < 5
        assert text.startswith(f"rank 1 of the group failed: {expected.__name__}")
        assert "query" in text


def test_a_rank_inside_vmap_is_named_on_every_rank(ranks):
    found = ranks.run(2, complaint_in_vmap, 1)
    assert found[1][0] is NotImplementedError and "query" in found[1][1]
    assert found[0][0] is ValueError and "rank 1 of the group failed" in found[0][1]


def test_tensors_of_collectives_are_waited_for(ranks):
    ranks.run(2, check_asynchronous)


@pytest.mark.parametrize(
    ("kind", "expected", "value"),
    [
        ("not a member", TypeError, "NON_GROUP_MEMBER"),
        ("unknown", ValueError, "ProcessGroup"),
        ("mesh", ValueError, "DeviceMesh"),
        ("integer", TypeError, "3"),
        ("string", TypeError, "'x'"),
    ],
)
def test_what_is_no_group_of_this_process_is_named(ranks, kind, expected, value):
    for rank, (error, text) in enumerate(ranks.run(2, complaint_about_group, kind)):
        assert error is expected and text.startswith("group must be") and value in text
        assert kind not in ("not a member", "unknown") or f"rank {rank}" in text


def test_tensors_on_a_device_without_a_backend_are_named(ranks):
    for error, text in ranks.run(8, complaint_on_another_device):
        assert error is ValueError and "query must be on a device of the group" in text
        assert "cpu" in text
