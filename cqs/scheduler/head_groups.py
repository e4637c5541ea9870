"""Head-parallel degrees: into how many groups heads may be divided among ranks."""


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
