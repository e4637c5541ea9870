"""How many heads a rank computes, and how many of them at one time."""

import math
from typing import NamedTuple


class ChunkRule(NamedTuple):
    """From which work on head chunks pay, in operations of a rank's forward pass."""

    two: float
    four: float
    """With less a GPU waits until they are launched."""
    four_of_both: float
    """Likewise if gradients follow."""
    most_keys: float
    """Held by a rank where four pay though gradients follow: the end of a kernel leaves most of a
    GPU idle for part of a tile, and tiles are as long as there are keys."""


FETCHED = ChunkRule(5e11, 8e12, 2e12, 65_536)
"""Where GPUs reach each other's memory."""
SENT = ChunkRule(2e12, 8e12, 8e12, math.inf)
"""Where ranks send messages."""


def why_not_head_parallel(
    head_parallel: int, num_ranks: int, num_heads: int, num_kv_heads: int
) -> str | None:
    """Say why the heads cannot be cut into so many slices, or return None if they can."""
    if num_ranks % head_parallel:
        return f"it must divide the number of ranks, {num_ranks}"
    if num_heads % head_parallel:
        return f"it must divide num_heads, {num_heads}"
    if num_kv_heads % head_parallel and head_parallel % num_kv_heads:
        return f"it must divide num_kv_heads, {num_kv_heads}, or be a multiple of it"
    return None


def possible_head_parallel(num_ranks: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """List the numbers of slices into which the heads can be cut, ascending.

    Example:
        >>> possible_head_parallel(12, num_heads=32, num_kv_heads=8)
        [1, 2, 4]
    """
    return [
        number
        for number in range(1, min(num_ranks, num_heads) + 1)
        if why_not_head_parallel(number, num_ranks, num_heads, num_kv_heads) is None
    ]


def choose_num_chunks(
    most: int | None,
    *,
    flops: float,
    num_ranks: int,
    num_kv_heads: int,
    num_keys: int,
    with_gradients: bool,
    rule: ChunkRule = FETCHED,
) -> int:
    """Return into how many parts a rank cuts its heads: a divisor of the number of key heads.

    Of S head chunks a part of 1/S of what travels is not hidden. Each takes the caller as long, and
    has kernels with ends of their own. More than four make kernels too short.

    Args:
        most: At most so many; ``None`` chooses by the work.
        flops: What a rank computes in the forward pass.
        num_ranks: A single one has nothing that could travel meanwhile.
        num_kv_heads: Of a rank.
        num_keys: That a rank holds.
        with_gradients: Whether a backward pass follows, in as many.
        rule: By how rows travel.

    Example:
        >>> options = {"num_ranks": 8, "num_kv_heads": 4}
        >>> [
        ...     choose_num_stages(
        ...         None, flops=flops, num_keys=num_keys, with_gradients=both, **options
        ...     )
        ...     for flops, num_keys in ((6e11, 2**15), (2e12, 2**15), (3e13, 2**17))
        ...     for both in (False, True)
        ... ]
        [2, 2, 2, 4, 4, 2]
        >>> options |= {"flops": 3e13, "num_keys": 2**17, "with_gradients": True}
        >>> choose_num_stages(None, rule=SENT, **options)
        4
    """
    if most is None:
        most = 1
        if num_ranks > 1 and flops >= rule.two:
            four = rule.four_of_both if with_gradients else rule.four
            are_long = with_gradients and num_keys > rule.most_keys
            most = 4 if flops >= four and not are_long else 2
    return max(n for n in range(1, min(max(most, 1), num_kv_heads) + 1) if num_kv_heads % n == 0)
