"""How many heads a rank computes, and how many of them at one time."""

import math

STAGE_FLOPS = 1.25e11
"""See :func:`choose_num_stages`; where GPUs reach each other's memory."""
_MAX_STAGES = 4


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


def choose_num_stages(
    most: int | None,
    *,
    flops: float,
    num_ranks: int,
    num_kv_heads: int,
    stage_flops: float = STAGE_FLOPS,
) -> int:
    """Return into how many parts a rank cuts its heads: a divisor of the number of key heads.

    Of S stages a part of 1/S of what travels is not hidden, and each takes the caller as long: the
    best S grows with the root of the work. More than four make kernels too short.

    Args:
        most: At most so many; ``None`` chooses by the work.
        flops: What a rank computes in the forward pass.
        num_ranks: A single one has nothing that could travel meanwhile.
        num_kv_heads: Of a rank.
        stage_flops: S stages pay from S^2 times this on.

    Example:
        >>> choose_num_stages(None, flops=6e11, num_ranks=8, num_kv_heads=4)
        2
    """
    if most is None:
        most = min(math.isqrt(int(flops / stage_flops)), _MAX_STAGES) if num_ranks > 1 else 1
    return max(n for n in range(1, min(max(most, 1), num_kv_heads) + 1) if num_kv_heads % n == 0)
