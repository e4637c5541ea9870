"""Check that tasks compute every live pair exactly once, from their blocks alone."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cqs.scheduler.strips import Count
from cqs.scheduler.task import Block, Step, Task


def validate_tasks(tasks: Iterable[Task], seqlen_q: int, seqlen_kv: int, is_causal: bool) -> None:
    """Raise unless every live pair lies in exactly one block and no block has masked pairs.

    The query axis is cut wherever a block begins or ends, so the same blocks apply to every row
    between two cuts. Their key ranges must tile the keys that those rows see: all keys or, with a
    causal mask, the keys up to the diagonal, of which a causal square is the last range.

    Args:
        tasks: All tasks of a plan without a pattern.
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys.
        is_causal: Whether attention is causal, aligned at the bottom right.

    Raises:
        ValueError: A pair is computed twice, never, or although it is masked out (the message gives
            rows and keys); or the number of live pairs of a step is wrong.
    """
    steps = [step for task in tasks for step in task.steps]
    blocks = [block for step in steps for block in step.blocks()]
    for block in blocks:
        if not block.num_pairs:
            raise ValueError(f"{block} holds no live pair")
        if block.is_causal and len(block.queries) != len(block.keys):
            raise ValueError(f"{block} is no square")
    first_live = [max(seqlen_q - seqlen_kv, 0)] if is_causal else []
    for rows, active in _rows_and_blocks(blocks, seqlen_q, first_live):
        _check_rows(rows, active, seqlen_kv, seqlen_kv - seqlen_q, is_causal)
    for step in steps:
        _check_live_pairs(step, sum(block.num_pairs for block in step.blocks()))


def validate_pattern_tasks(
    tasks: Iterable[Task], seqlen_q: int, seqlen_kv: int, count: Count
) -> None:
    """Raise unless every live pair of a pattern lies in exactly one block and every block has one.

    The query axis is cut wherever a block begins or ends. Between two cuts the key ranges of the
    blocks must not overlap, and the gaps between them must have no live pair. The live pairs of
    the steps, which are also checked, therefore add up to those of the pattern.

    Args:
        tasks: All tasks of a plan with a pattern.
        seqlen_q: Number of queries.
        seqlen_kv: Number of keys.
        count: Returns the number of live pairs of a range of queries and a range of keys.

    Raises:
        ValueError: A live pair is computed twice or never; a block has no live pair, is causal or
            exceeds the lengths; or the number of live pairs of a step is wrong.
    """
    steps = [step for task in tasks for step in task.steps]
    blocks = [block for step in steps for block in step.blocks()]
    for block in blocks:
        if block.is_causal:
            raise ValueError(f"{block} is a causal block in a plan with a pattern")
        if block.keys.start < 0 or block.keys.stop > seqlen_kv:
            raise ValueError(f"{block} reaches beyond the {seqlen_kv} keys")
    for rows, active in _rows_and_blocks(blocks, seqlen_q):
        position = 0
        ends = range(seqlen_kv, seqlen_kv)
        for keys in (*sorted((block.keys for block in active), key=lambda k: k.start), ends):
            if keys.start < position:
                raise ValueError(f"keys {keys.start}..{position} of queries {rows} are owned twice")
            if count(rows, range(position, keys.start)):
                raise ValueError(f"keys {position}..{keys.start} of queries {rows} are owned never")
            position = keys.stop
    for step in steps:
        live_pairs = [count(step.queries, keys) for keys in step.keys]
        if not all(live_pairs):
            raise ValueError(f"{step} holds no live pair of {step.keys[live_pairs.index(0)]}")
        _check_live_pairs(step, sum(live_pairs))


def validate_single_tasks(tasks: Iterable[Task]) -> None:
    """Raise ValueError if two steps of tasks have a common query row."""
    rows = sorted((step.queries.start, step.queries.stop) for task in tasks for step in task.steps)
    for (_, stop), (start, _) in pairwise(rows):
        if start < stop:
            raise ValueError(f"queries {start}..{stop} have keys in two steps")


def _rows_and_blocks(
    blocks: list[Block], seqlen_q: int, cuts: Iterable[int] = ()
) -> Iterator[tuple[range, list[Block]]]:
    """Yield row ranges, cut at the ends of blocks and at ``cuts``, with the blocks that span them.

    Raises:
        ValueError: A block begins before query 0 or ends after query ``seqlen_q``.
    """
    starting: dict[int, list[Block]] = {}
    for block in blocks:
        starting.setdefault(block.queries.start, []).append(block)
    edges = {edge for block in blocks for edge in (block.queries.start, block.queries.stop)}
    ordered = sorted({0, seqlen_q, *cuts, *edges})
    if ordered[0] < 0 or ordered[-1] > seqlen_q:
        raise ValueError(f"blocks reach beyond the {seqlen_q} queries")
    active: list[Block] = []
    for start, stop in pairwise(ordered):
        active = [block for block in active if block.queries.stop > start]
        active += starting.get(start, [])
        yield range(start, stop), active


def _check_live_pairs(step: Step, live_pairs: int) -> None:
    """Raise ValueError unless ``step.live_pairs`` is ``live_pairs``."""
    if step.live_pairs != live_pairs:
        raise ValueError(f"{step} holds {live_pairs} live pairs")


def _check_rows(
    rows: range, blocks: list[Block], seqlen_kv: int, diagonal: int, is_causal: bool
) -> None:
    """Raise ValueError unless ``blocks``, all spanning ``rows``, tile the keys of these rows."""
    pieces = []
    for block in blocks:
        pieces.append((block.keys.start, block.keys.stop, block.is_causal))
        if block.is_causal and (not is_causal or block.queries != rows):
            # Other blocks cut this causal square. All of ``rows`` see its keys before their own
            # diagonal, so it becomes a rectangle followed by a smaller square.
            offset = block.keys.start - block.queries.start
            pieces[-1:] = [
                (block.keys.start, rows.start + offset, False),
                (rows.start + offset, rows.stop + offset, True),
            ]
    position = 0
    for start, stop, causal in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if start != position:
            kind = "twice" if start < position else "never"
            low, high = sorted((start, position))
            raise ValueError(f"keys {low}..{high} of queries {rows} are owned {kind}")
        if causal and (not is_causal or start != rows.start + diagonal):
            raise ValueError(f"queries {rows} have a causal block off the diagonal at key {start}")
        position = stop
    visible = seqlen_kv if not is_causal else max(rows.stop + diagonal, 0)
    if position != visible:
        kind = "never" if position < visible else "though masked out"
        raise ValueError(f"keys {position}..{visible} of queries {rows} are owned {kind}")
    if is_causal and visible and not any(piece[2] for piece in pieces):
        raise ValueError(f"queries {rows} have no causal block on the diagonal")
