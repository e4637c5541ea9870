"""The proof that tasks cover attention exactly once, from their blocks alone."""

from collections.abc import Iterable

from cqs.scheduler.task import Block, Task


def validate_tasks(tasks: Iterable[Task], seqlen_q: int, seqlen_kv: int, is_causal: bool) -> None:
    """Raise unless every live pair lies in exactly one block and every block is live.

    The query axis is cut wherever a block begins or ends; between two cuts the same blocks apply
    to every row, and their key ranges must tile what those rows see: all keys, or for causal rows
    r.. the keys up to the diagonal, closed by a causal square.

    Raises:
        ValueError: if they do not; the message names the rows and the keys.
    """
    blocks = [block for task in tasks for block in task.blocks]
    starting: dict[int, list[Block]] = {}
    for block in blocks:
        if not block.live_pairs:
            raise ValueError(f"{block} holds no live pair")
        if block.is_causal and len(block.queries) != len(block.keys):
            raise ValueError(f"{block} is no square")
        starting.setdefault(block.queries.start, []).append(block)
    cuts = {0, seqlen_q} | {b.queries.start for b in blocks} | {b.queries.stop for b in blocks}
    if is_causal:
        cuts.add(max(seqlen_q - seqlen_kv, 0))
    ordered = sorted(cuts)
    if ordered[0] < 0 or ordered[-1] > seqlen_q:
        raise ValueError(f"blocks reach beyond the {seqlen_q} queries")
    active: list[Block] = []
    for start, stop in zip(ordered, ordered[1:], strict=False):
        active = [block for block in active if block.queries.stop > start]
        active += starting.get(start, [])
        _check_rows(range(start, stop), active, seqlen_kv, seqlen_kv - seqlen_q, is_causal)


def _check_rows(
    rows: range, blocks: list[Block], seqlen_kv: int, diagonal: int, is_causal: bool
) -> None:
    """Check that ``blocks``, all spanning ``rows``, tile the keys that these rows see."""
    pieces = []
    for block in blocks:
        pieces.append((block.keys.start, block.keys.stop, block.is_causal))
        if block.is_causal and (not is_causal or block.queries != rows):
            # A square cut by other blocks: rows below its first see part of it fully.
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
        kind = "never" if position < visible else "though dead"
        raise ValueError(f"keys {position}..{visible} of queries {rows} are owned {kind}")
    if is_causal and visible and not any(piece[2] for piece in pieces):
        raise ValueError(f"queries {rows} have no causal block on the diagonal")
