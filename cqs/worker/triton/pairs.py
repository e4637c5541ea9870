"""What the plain kernels share: runs, and which pairs of a tile and a block count."""

import triton
import triton.language as tl


@triton.jit
def load_run(runs, run):
    """Return start, stop, low and high of a run."""
    fields = runs + run * 4
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)


@triton.jit
def visible(rows, columns, stop, low, high):
    """Say which pairs of a tile and a block lie before a run's end and in its band."""
    distance = columns[None, :] - rows[:, None]
    return (columns < stop)[None, :] & (distance >= low) & (distance <= high)


@triton.jit
def query_words(words, rows, mask):
    """Load the multipliers and increments of queries; see cqs/dropout.py."""
    multiplier = tl.load(words[0] + rows, mask=mask, other=0)
    return multiplier, tl.load(words[1] + rows, mask=mask, other=0)


@triton.jit
def key_words(words, keys, mask):
    """Load the words of keys."""
    return tl.load(words[2] + keys, mask=mask, other=0)


@triton.jit
def is_kept(multiplier, increment, key, drop_below):
    """Say which pairs dropout keeps; the words broadcast to pairs."""
    return ((multiplier * key + increment >> 32) & 0xFFFFFFFF) >= drop_below
