"""Check that tasks compute every live pair exactly once, from their blocks alone."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cqs.scheduler.strips import Count
from cqs.scheduler.task import Block, Task


def validate_tasks(
    tasks: Iterable[Task], seqlen_q: int, seqlen_kv: int, count: Count, *, is_sparse: bool
) -> None:
    """Raise unless every live pair lies in exactly one block and every block has live pairs alone.

    The query axis is cut wherever a block begins or ends, so the same blocks apply to every row
    between two cuts. Their key ranges must not overlap, and the gaps between them must have no live
    pair. A causal square whose number of live pairs is that of a triangle lies on the diagonal.

    Args:
        tasks: All tasks of a plan.
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys.
        count: Returns the number of live pairs of a range of queries and a range of keys.
        is_sparse: Whether the plan has a pattern: blocks then need one live pair, and are not
            causal squares, because the pattern includes the causal mask.

    Raises:
        ValueError: A pair is computed twice, never, or although it is masked out (the message gives
            rows and keys); a block exceeds the lengths; or the number of live pairs of a step is
            wrong.
    """
    steps = [step for task in tasks for step in task.steps]
    blocks = [block for step in steps for block in step.blocks()]
    for block in blocks:
        _check_shape(block, seqlen_kv, is_sparse)
    ends = range(seqlen_kv, seqlen_kv)
    for rows, active in _rows_and_blocks(blocks, seqlen_q):
        position = 0
        for keys in (*sorted((block.keys for block in active), key=lambda k: k.start), ends):
            if keys.start < position:
                raise ValueError(f"keys {keys.start}..{position} of queries {rows} are owned twice")
            if keys.start > position and count(rows, range(position, keys.start)):
                raise ValueError(f"keys {position}..{keys.start} of queries {rows} are owned never")
            position = keys.stop
    for step in steps:
        live_pairs = 0
        for block in step.blocks():
            number = count(block.queries, block.keys)
            if not number:
                raise ValueError(f"{block} holds no live pair")
            if not is_sparse and number != block.num_pairs:
                where = "off the diagonal" if block.is_causal else "of masked pairs"
                raise ValueError(f"{block} is a block {where}: its live pairs are {number}")
            live_pairs += number
        if step.live_pairs != live_pairs:
            raise ValueError(f"{step} holds {live_pairs} live pairs")


def validate_single_tasks(tasks: Iterable[Task]) -> None:
    """Raise ValueError if two steps of tasks have a common query row."""
    rows = sorted((step.queries.start, step.queries.stop) for task in tasks for step in task.steps)
    for (_, stop), (start, _) in pairwise(rows):
        if start < stop:
            raise ValueError(f"queries {start}..{stop} have keys in two steps")


def _check_shape(block: Block, seqlen_kv: int, is_sparse: bool) -> None:
    """Raise ValueError if a block is not valid by itself, whichever pairs are live."""
    if not block.num_pairs:
        raise ValueError(f"{block} holds no live pair")
    if block.is_causal and is_sparse:
        raise ValueError(f"{block} is a causal block in a plan with a pattern")
    if block.is_causal and len(block.queries) != len(block.keys):
        raise ValueError(f"{block} is no square")
    if block.keys.start < 0 or block.keys.stop > seqlen_kv:
        raise ValueError(f"{block} reaches beyond the {seqlen_kv} keys")


def _rows_and_blocks(blocks: list[Block], seqlen_q: int) -> Iterator[tuple[range, list[Block]]]:
    """Yield row ranges, cut at the ends of blocks, with the blocks that span them.

    Raises:
        ValueError: A block begins before query 0 or ends after query ``seqlen_q``.
    """
    starting: dict[int, list[Block]] = {}
    for block in blocks:
        starting.setdefault(block.queries.start, []).append(block)
    edges = {edge for block in blocks for edge in (block.queries.start, block.queries.stop)}
    ordered = sorted({0, seqlen_q, *edges})
    if ordered[0] < 0 or ordered[-1] > seqlen_q:
        raise ValueError(f"blocks reach beyond the {seqlen_q} queries")
    active: list[Block] = []
    for start, stop in pairwise(ordered):
        active = [block for block in active if block.queries.stop > start]
        active += starting.get(start, [])
        yield range(start, stop), active
