"""Operations on ranges of tokens."""

from collections.abc import Sequence


def meets(one: range, other: range) -> bool:
    """Return whether two ranges of step 1 have a common token."""
    return max(one.start, other.start) < min(one.stop, other.stop)


def contains(outer: range, inner: range) -> bool:
    """Return whether one range of step 1 lies within another; an empty one also at its ends."""
    return outer.start <= inner.start and inner.stop <= outer.stop


def overlap(one: range, other: range) -> range:
    """Return the common tokens of two ranges of step 1."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def moved(tokens: range, by: int) -> range:
    """Return a range with ``by`` added to every token."""
    return range(tokens.start + by, tokens.stop + by, tokens.step)


def rows_of(tokens: range, ranges: Sequence[range]) -> range:
    """Return the row numbers of ``tokens`` in a tensor that stores ``ranges`` one after another.

    Args:
        tokens: Token positions; must be contiguous in the tensor.
        ranges: Token positions of the tensor's rows.

    Raises:
        KeyError: A token is not held, or the tokens are not adjacent rows.

    Example:
        >>> rows_of(range(8, 12), [range(0, 4), range(6, 10), range(10, 20)])
        range(6, 10)
    """
    first = 0
    for i, held in enumerate(ranges):
        if held.start <= tokens.start < held.stop:
            stop = held.stop
            for following in ranges[i + 1 :]:
                if stop >= tokens.stop or following.start != stop:
                    break
                stop = following.stop
            if tokens.stop <= stop:
                start = first + tokens.start - held.start
                return range(start, start + len(tokens))
        first += len(held)
    raise KeyError(f"tokens {tokens.start}..{tokens.stop} are not held")
