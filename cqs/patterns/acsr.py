"""Patterns with one arithmetic progression of keys per row, converted to affine pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cqs.patterns.algebra import tidy_all
from cqs.patterns.bound import BoundPattern
from cqs.patterns.masks import as_array
from cqs.patterns.pattern import Lengths, Pattern, content_digest
from cqs.patterns.piece import FAR, Axis, Piece
from cqs.uncompiled import uncompiled


@uncompiled
def acsr(start: Any, step: Any, count: Any) -> Pattern:
    """Return the pattern in which query i sees keys ``start[i] + step[i] * c``, c < ``count[i]``.

    This is the affine-compressed-sparse-row format of SPLAT (Gupta et al., arXiv 2407.16847), for
    sequences of ``len(start)`` queries. Adjacent rows with the same step are joined into one piece
    if their first and last keys are constant or advance by one per row. A window takes at most
    three pieces and a block takes one; an irregular row takes one each. Takes O(rows).

    Args:
        start: First key of every row, ``[seqlen_q]``, integers of at least 0.
        step: Distance between the keys of every row, ``[seqlen_q]``, integers of at least 1.
        count: Number of keys of every row, ``[seqlen_q]``, integers of at least 0.

    Raises:
        TypeError: An argument is not a one-dimensional array of integers.
        ValueError: A value is out of range, or the arguments differ in length.

    Example:
        >>> acsr([0, 1, 0], [1, 1, 2], [1, 1, 2]).to_mask(3).astype(int).tolist()
        [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    columns = []
    for name, values, least in (("start", start, 0), ("step", step, 1), ("count", count, 0)):
        array = as_array(values)
        if array.ndim != 1 or array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{name} must be a row of integers, got {values!r}")
        if array.size and array.min() < least:
            raise ValueError(f"{name} must be at least {least}, got {array.min()}")
        columns.append(array.tolist())
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"start, step and count must be of one length, got {list(map(len, columns))}"
        )
    rows = [_Progression(*row) for row in zip(range(len(columns[0])), *columns, strict=True)]
    seqlen_kv = max((row.last + 1 for row in rows if row.num_keys), default=0)
    if seqlen_kv > FAR:
        raise ValueError(f"keys must lie below {FAR}, got {seqlen_kv - 1}")
    return _Rows(len(rows), seqlen_kv, tuple(tidy_all(_as_pieces(rows))))


class _Progression(NamedTuple):
    """The keys of one query, as an arithmetic progression."""

    query: int
    start: int
    step: int
    num_keys: int

    @property
    def last(self) -> int:
        return self.start + self.step * (self.num_keys - 1)


@dataclass(frozen=True, repr=False)
class _Rows(Pattern):
    num_rows: int
    num_keys: int
    """Largest key index of any row, plus 1."""
    pieces: tuple[Piece, ...]

    @property
    def default_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.num_rows, max(self.num_rows, self.num_keys)

    def suits(self, lengths: tuple[int, int]) -> bool:
        """Return whether the lengths have one query per row and every key of the rows."""
        return lengths[0] == self.num_rows and lengths[1] >= self.num_keys

    def _bind(self, lengths: Lengths) -> BoundPattern:
        if not self.suits(lengths):
            raise ValueError(
                f"{self!r} requires {self.num_rows} queries and at least {self.num_keys} keys, "
                f"got {tuple(lengths)}"
            )
        return BoundPattern(*lengths, self.pieces)

    def __repr__(self) -> str:
        digest = content_digest(repr(self.pieces).encode())
        return f"acsr(<{self.num_rows} rows, {len(self.pieces)} pieces, {digest}>)"


def _as_pieces(rows: list[_Progression]) -> Iterator[Piece]:
    """Yield one piece for each longest run of rows that a single piece can represent."""
    run: list[_Progression] = []
    rules: set[str] = set()
    for row in [*rows, _Progression(len(rows), 0, 1, 0)]:  # a row without keys ends the last run
        fewer = rules & _rules(run[0], row) if run else rules
        if _suffice(fewer):
            rules = fewer
            run.append(row)
            continue
        if run:
            yield _as_piece(run[0], run[-1], rules)
        run, rules = [row] if row.num_keys else [], _rules(row, row)


def _rules(first: _Progression, row: _Progression) -> set[str]:
    """Return the rules under which ``row`` continues a run that begins with ``first``.

    In a diagonal run, the first and the last key each advance by one per row or stay in one cell.
    """
    step, moved = row.step, row.query - first.query
    if step != first.step or not row.num_keys:
        return set()
    is_diagonal = (row.start - first.start - moved) % step == 0
    found = {
        "constant": row[1:] == first[1:],
        "start advances": is_diagonal and row.start - first.start == moved,
        "start is constant": is_diagonal and row.start // step == first.start // step,
        "last advances": is_diagonal and row.last - first.last == moved,
        "last is constant": is_diagonal and row.last // step == first.last // step,
    }
    return {rule for rule, holds in found.items() if holds}


def _suffice(rules: set[str]) -> bool:
    edges = {rule.partition(" ")[0] for rule in rules}
    return "constant" in edges or edges >= {"start", "last"}


def _as_piece(first: _Progression, final: _Progression, rules: set[str]) -> Piece:
    queries, step = range(first.query, final.query + 1), first.step
    if "constant" in rules:
        return Piece(Axis(queries), Axis(range(first.start, first.last + 1), first.start, step))
    ahead = (first.start - first.query) % step
    low, high, start, stop = -FAR, FAR, 0, max(first.last, final.last) + 1
    if "start advances" in rules:
        low = (first.start - first.query) // step
    else:
        start = first.start // step * step
    if "last advances" in rules:
        high = (first.last - first.query) // step
    else:
        stop = (first.last // step + 1) * step
    rows, columns = Axis(queries, -ahead, step, step), Axis(range(start, stop), 0, step, step)
    return Piece(rows, columns, low, high, 0, 0)
