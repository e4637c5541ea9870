"""Check that tasks compute every live pair exactly once, from their blocks alone."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cqs.scheduler.task import Block, Step, Task
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
    numbers = [sum(_count_live(block, groups) for block in step.blocks()) for step in steps]
    ends = range(groups.seqlen_kv, groups.seqlen_kv)
    for rows, active in _rows_and_blocks(steps, groups.seqlen_q):
        position = 0
        for keys in (*sorted((block.keys for block in active), key=lambda k: k.start), ends):
            if keys.start < position:
                raise ValueError(f"keys {keys.start}..{position} of queries {rows} are owned twice")
            if keys.start > position and groups.count(rows, range(position, keys.start)):
                raise ValueError(f"keys {position}..{keys.start} of queries {rows} are owned never")
            position = keys.stop
    for step, live_pairs in zip(steps, numbers, strict=True):
        if step.live_pairs != live_pairs:
            raise ValueError(f"{step} holds {live_pairs} live pairs")


def validate_single_tasks(tasks: Iterable[Task]) -> None:
    """Raise ValueError if two steps of tasks have a common query row."""
    rows = sorted((step.queries.start, step.queries.stop) for task in tasks for step in task.steps)
    for (_, stop), (start, _) in pairwise(rows):
        if start < stop:
            raise ValueError(f"queries {start}..{stop} have keys in two steps")


def _count_live(block: Block, groups: TokenGroups) -> int:
    """Return the number of live pairs of a block, or raise ValueError if it is not valid alone."""
    if block.is_causal and groups.pattern is not None:
        raise ValueError(f"{block} is a causal block in a plan with a pattern")
    if block.is_causal and len(block.queries) != len(block.keys):
        raise ValueError(f"{block} is no square")
    if block.keys.start < 0 or block.keys.stop > groups.seqlen_kv:
        raise ValueError(f"{block} reaches beyond the {groups.seqlen_kv} keys")
    if block.queries.start < 0 or block.queries.stop > groups.seqlen_q:
        raise ValueError(f"blocks reach beyond the {groups.seqlen_q} queries")
    number = groups.count(block.queries, block.keys)
    if not number:
        raise ValueError(f"{block} holds no live pair")
    if groups.pattern is None and number != block.num_pairs:
        where = "off the diagonal" if block.is_causal else "of masked pairs"
        raise ValueError(f"{block} is a block {where}: its live pairs are {number}")
    return number


def _rows_and_blocks(steps: list[Step], seqlen_q: int) -> Iterator[tuple[range, list[Block]]]:
    """Yield row ranges, cut at the ends of blocks, with the blocks that span them."""
    starting: dict[int, list[Block]] = {}
    for step in steps:
        starting.setdefault(step.queries.start, []).extend(step.blocks())
    edges = {edge for step in steps for edge in (step.queries.start, step.queries.stop)}
    ordered = sorted({0, seqlen_q, *edges})
    active: list[Block] = []
    for start, stop in pairwise(ordered):
        active = [block for block in active if block.queries.stop > start]
        active += starting.get(start, [])
        yield range(start, stop), active
