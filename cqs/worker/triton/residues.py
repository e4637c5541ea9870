"""Dilated patterns as dense ones: every residue of the tokens becomes a head.

The backward kernel with five products, see hopper_rectangle.py, reads adjacent rows. Tokens of one
residue are adjacent in a view of the tensors in which the residues of a head are heads.
"""

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from cqs.patterns.piece import FAR
from cqs.patterns.views import View
from cqs.worker.operands import TaskOperands
from cqs.worker.triton.visits import count_pairs
from cqs.worker.work import BlockRow, Work

_LEAST_KEYS = 1536
"""Mean live keys of a query from which residues become heads.

With 1600 to 32,768, the gradients take 0.75 to 0.93 of the time of the kernels of seven products,
with 256 to 1024 0.97 to 1.73 (one H200, 16K and 64K tokens, copies included)."""


class Residues(NamedTuple):
    """Pairs of queries and keys of equal residue, the same ones for every residue."""

    step: int
    """Number of residues."""
    work: Work
    """The pairs of one residue, in the numbers of its own rows."""
    num_keys: float
    """Mean live keys of a query."""

    @property
    def is_faster(self) -> bool:
        """Return whether queries see so many keys that the kernel with five products is faster."""
        return self.num_keys >= _LEAST_KEYS

    def fold(self, tensor: Tensor, num_kv_heads: int) -> Tensor:
        """Return the residues of a tensor as heads, a view if its memory allows one.

        Args:
            tensor: ``[batch, num_heads, rows, ...]``.
            num_kv_heads: Number of KV heads.

        Returns:
            ``[batch * num_kv_heads, step * group, rows / step, ...]``.
        """
        parts: Tensor = tensor.unflatten(2, (-1, self.step)).unflatten(1, (num_kv_heads, -1))
        return parts.movedim(4, 2).flatten(2, 3).flatten(0, 1)

    def unfold(self, folded: Tensor, num_kv_heads: int) -> Tensor:
        """Return the contiguous tensor ``[batch, num_heads, rows, ...]`` of these residues."""
        parts: Tensor = folded.unflatten(1, (self.step, -1)).unflatten(0, (-1, num_kv_heads))
        return parts.movedim(2, 4).flatten(3, 4).flatten(1, 2).contiguous()

    def fold_operands(self, operands: TaskOperands) -> TaskOperands:
        """Return operands of all residues, given some without dropout or score terms."""
        num_kv_heads = operands.key.shape[1]
        query, key, value = (self.fold(tensor, num_kv_heads) for tensor in operands[:3])
        return operands._replace(query=query, key=key, value=value, work=self.work)

    def unfold_gradients(self, gradients: list[Tensor], num_kv_heads: int) -> list[Tensor]:
        """Return the gradients of query, key and value; the list of all residues' is emptied."""
        unfolded: list[Tensor] = []
        while gradients:  # one at a time, because both take memory
            unfolded.append(self.unfold(gradients.pop(0), num_kv_heads))
        return unfolded


@lru_cache(maxsize=256)
def find_residues(work: Work, num_queries: int, num_keys: int) -> Residues | None:
    """Return the residues of a work, or ``None`` if it has other pairs or one residue.

    Args:
        work: The block rows.
        num_queries: Rows of the query tensor.
        num_keys: Rows of the key tensor.

    Example:
        >>> views = [View(range(r, 6, 2), range(r, 4, 2), -4, 0) for r in range(2)]
        >>> residues = find_residues(Work((BlockRow(range(6), tuple(views)),)), 6, 4)
        >>> residues.step, residues.work.block_rows[0].views
        (2, (View(queries=range(0, 3), keys=range(0, 2), low=-2, high=0, bits=None),))
    """
    views = [view for block_row in work.block_rows for view in block_row.views]
    step = len(views)
    if step < 2 or num_queries % step or num_keys % step:
        return None
    residues = set()
    for view in views:
        queries, keys, *_, bits = view
        is_one = queries.step == keys.step == step and (keys.start - queries.start) % step == 0
        if not (is_one and queries) or bits is not None:
            return None
        residues.add(queries.start % step)
    if len(residues) < step or len(set(map(_in_own_rows, views))) > 1:
        return None
    residue_view = _in_own_rows(views[0])
    work = Work((BlockRow(residue_view.queries, (residue_view,)),))
    return Residues(step, work, count_pairs(residue_view) / len(residue_view.queries))


def _in_own_rows(view: View) -> View:
    """Return a view of one residue in the numbers of the rows of this residue."""
    queries, keys, low, high, _ = view
    step = queries.step
    queries, keys = (
        range(rows.start // step, rows.start // step + len(rows)) for rows in (queries, keys)
    )
    low, high = (low if low <= -FAR else -(-low // step)), (high if high >= FAR else high // step)
    return View(queries, keys, low, high)
