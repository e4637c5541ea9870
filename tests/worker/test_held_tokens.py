import pytest
import torch

from cqs.worker import HeldTokens


@pytest.fixture
def whole():
    return torch.randn(2, 3, 20, 4)


@pytest.fixture
def held(whole):
    """Tokens 2..8, 8..12 and 15..20, given in another order."""
    pieces = [range(15, 20), range(2, 8), range(8, 12)]
    return HeldTokens((piece, whole[:, :, piece.start : piece.stop]) for piece in pieces)


@pytest.mark.parametrize("tokens", [range(2, 8), range(3, 5), range(8, 12), range(19, 20)], ids=str)
def test_tokens_of_one_piece_are_a_view(whole, held, tokens):
    taken = held.take([tokens])
    assert torch.equal(taken, whole[:, :, tokens.start : tokens.stop])
    assert taken.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "ranges",
    [
        [range(2, 12)],
        [range(7, 9)],
        [range(2, 4), range(6, 8)],
        [range(3, 9), range(15, 16), range(17, 20)],
        [range(17, 20), range(3, 9)],
    ],
    ids=str,
)
def test_tokens_of_several_pieces_are_copied_in_the_order_asked_for(whole, held, ranges):
    taken = held.take(ranges)
    assert torch.equal(taken, whole[:, :, [token for tokens in ranges for token in tokens]])
    assert taken.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("ranges", "missing"),
    [
        ([range(0, 3)], "0..3"),
        ([range(10, 16)], "12..16"),
        ([range(18, 21)], "20..21"),
        ([range(3, 5), range(12, 13)], "12..13"),
        ([range(30, 40)], "30..40"),
    ],
    ids=["before", "gap", "after", "second", "far"],
)
def test_tokens_that_are_not_held_are_named(held, ranges, missing):
    with pytest.raises(KeyError, match=missing):
        held.take(ranges)


def test_nothing_is_held_without_pieces():
    with pytest.raises(KeyError, match="0..1"):
        HeldTokens([]).take([range(1)])
