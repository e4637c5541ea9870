"""Operations on ranges of tokens."""


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
