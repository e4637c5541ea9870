import pytest
import torch

from cqs.worker import HeldTokens


@pytest.fixture
def whole():
    return torch.randn(2, 3, 20, 4)


@pytest.fixture
def held(whole):
    """Tokens 2..8, 8..12 and 15..20."""
    ranges = range(2, 8), range(8, 12), range(15, 20)
    return HeldTokens(None, ranges, [whole[:, :, part.start : part.stop] for part in ranges])


@pytest.mark.parametrize(
    ("ranges", "is_view"),
    [
        ([range(2, 8)], True),
        ([range(3, 5)], True),
        ([range(19, 20)], True),
        ([range(2, 12)], False),
        ([range(2, 4), range(6, 8)], False),
        ([range(17, 20), range(3, 9)], False),
    ],
    ids=str,
)
def test_tokens_come_in_the_order_asked_for_as_a_view_if_possible(whole, held, ranges, is_view):
    taken = held.take(ranges)
    assert torch.equal(taken, whole[:, :, [token for tokens in ranges for token in tokens]])
    storages = (tensor.untyped_storage().data_ptr() for tensor in (taken, whole))
    assert (len({*storages}) == 1) is is_view


@pytest.mark.parametrize(
    ("tokens", "missing"),
    [
        (range(0, 3), "0..3"),
        (range(10, 16), "12..16"),
        (range(18, 21), "20..21"),
        (range(30, 40), "30..40"),
    ],
)
def test_tokens_that_are_not_held_are_named(held, tokens, missing):
    with pytest.raises(KeyError, match=missing):
        held.take([range(3, 5), tokens])
    with pytest.raises(KeyError, match="0..1"):
        HeldTokens(None, (), ()).take([range(1)])
