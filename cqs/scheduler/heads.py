"""Head-parallel degrees, and the number of head chunks of a rank."""

import math
from typing import NamedTuple


class ChunkRule(NamedTuple):
    """Thresholds of :func:`choose_num_chunks`, in FLOPs of a rank's forward pass."""

    two: float
    """FLOPs from which two chunks pay; with fewer, launch overhead is exposed."""
    four: float
    """FLOPs from which four chunks pay in a forward pass without gradients."""
    four_of_both: float
    """FLOPs of the forward pass from which four chunks pay if a backward pass follows."""
    most_keys: float
    """Keys of a rank up to which four chunks pay if a backward pass follows. With more, the tail of
    each kernel is longer, because the time of a tile grows with the number of keys."""


FETCHED = ChunkRule(5e11, 8e12, 2e12, 65_536)
"""Thresholds for P2P copies between GPUs."""
SENT = ChunkRule(2e12, 8e12, 8e12, math.inf)
"""Thresholds for messages of torch.distributed."""


def why_not_head_parallel(
    head_parallel: int, num_ranks: int, num_heads: int, num_kv_heads: int
) -> str | None:
    """Return why a head-parallel degree is not supported, or None if it is."""
    if num_ranks % head_parallel:
        return f"it must divide the number of ranks, {num_ranks}"
    if num_heads % head_parallel:
        return f"it must divide num_heads, {num_heads}"
    if num_kv_heads % head_parallel and head_parallel % num_kv_heads:
        return f"it must divide num_kv_heads, {num_kv_heads}, or be a multiple of it"
    return None


def possible_head_parallel(num_ranks: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """List the supported head-parallel degrees in ascending order.

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
    """Return the number of head chunks of a rank: a divisor of its number of KV heads.

    With S chunks, 1/S of the communication is exposed, but each chunk adds launch overhead and a
    kernel tail. With more than four, kernels become too short.

    Args:
        most: Maximum number of chunks; ``None`` chooses 1, 2 or 4 by the work.
        flops: FLOPs of a rank in the forward pass.
        num_ranks: Number of ranks. One rank has no communication to overlap.
        num_kv_heads: Number of KV heads of a rank.
        num_keys: Number of keys that a rank holds.
        with_gradients: Whether a backward pass follows, with the same number of chunks.
        rule: Thresholds of the transport.

    Example:
        >>> options = {"num_ranks": 8, "num_kv_heads": 4}
        >>> [
        ...     choose_num_chunks(
        ...         None, flops=flops, num_keys=num_keys, with_gradients=both, **options
        ...     )
        ...     for flops, num_keys in ((6e11, 2**15), (2e12, 2**15), (3e13, 2**17))
        ...     for both in (False, True)
        ... ]
        [2, 2, 2, 4, 4, 2]
        >>> options |= {"flops": 3e13, "num_keys": 2**17, "with_gradients": True}
        >>> choose_num_chunks(None, rule=SENT, **options)
        4
    """
    if most is None:
        most = 1
        if num_ranks > 1 and flops >= rule.two:
            four = rule.four_of_both if with_gradients else rule.four
            are_long = with_gradients and num_keys > rule.most_keys
            most = 4 if flops >= four and not are_long else 2
    return max(n for n in range(1, min(max(most, 1), num_kv_heads) + 1) if num_kv_heads % n == 0)
