"""Check that tasks compute every live pair exactly once, from their blocks alone."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cqs.scheduler.task import Block, Task
from cqs.scheduler.token_groups import TokenGroups


def validate_tasks(tasks: Iterable[Task], groups: TokenGroups) -> None:
    """Raise unless every live pair lies in exactly one block and every block has live pairs alone.

    The query axis is cut wherever a block begins or ends, so the same blocks apply to every row
    between two cuts. Their key ranges must not overlap, and the gaps between them must have no live
    pair. A causal square whose number of live pairs is that of a triangle lies on the diagonal. In
    a plan with a pattern a block needs a single live pair, and no block is a causal square.

    Args:
        tasks: All tasks of a plan.
        groups: Any division of the same problem into token groups, which counts live pairs.

    Raises:
        ValueError: A pair is computed twice, never, or although it is masked out (the message gives
            rows and keys); a block exceeds the lengths; or the number of live pairs of a step is
            wrong.
    """
    steps = [step for task in tasks for step in task.steps]
    blocks = [block for step in steps for block in step.blocks()]
    for block in blocks:
        _check_shape(block, groups)
    ends = range(groups.seqlen_kv, groups.seqlen_kv)
    for rows, active in _rows_and_blocks(blocks, groups.seqlen_q):
        position = 0
        for keys in (*sorted((block.keys for block in active), key=lambda k: k.start), ends):
            if keys.start < position:
                raise ValueError(f"keys {keys.start}..{position} of queries {rows} are owned twice")
            if keys.start > position and groups.count(rows, range(position, keys.start)):
                raise ValueError(f"keys {position}..{keys.start} of queries {rows} are owned never")
            position = keys.stop
    for step in steps:
        live_pairs = 0
        for block in step.blocks():
            number = groups.count(block.queries, block.keys)
            if not number:
                raise ValueError(f"{block} holds no live pair")
            if groups.pattern is None and number != block.num_pairs:
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


def _check_shape(block: Block, groups: TokenGroups) -> None:
    """Raise ValueError if a block is not valid by itself, whichever pairs are live."""
    if not block.num_pairs:
        raise ValueError(f"{block} holds no live pair")
    if block.is_causal and groups.pattern is not None:
        raise ValueError(f"{block} is a causal block in a plan with a pattern")
    if block.is_causal and len(block.queries) != len(block.keys):
        raise ValueError(f"{block} is no square")
    if block.keys.start < 0 or block.keys.stop > groups.seqlen_kv:
        raise ValueError(f"{block} reaches beyond the {groups.seqlen_kv} keys")


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
