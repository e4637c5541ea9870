"""Tokens on the GPU of an actor."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.tasks.inputs import Inputs, Sent, find_rows
from cqs.executors.ray.tasks.shared_memory import SharedTensor
from cqs.executors.streaming.plan import RowsOfHeads
from cqs.executors.streaming.transfers import DeviceCopies
from cqs.scheduler.task import join_ranges
from cqs.worker import HeldTokens


class GpuInputs(Inputs):
    """Copies tokens to a GPU: for one task, or each once for all tasks of a run.

    Tensors that are on this GPU already are read in place.
    """

    def __init__(self, copies: DeviceCopies):
        """Start without tokens.

        Args:
            copies: Copies host memory to the GPU of the actor.
        """
        super().__init__(copies.device)
        self._copies = copies
        self._whole: dict[bool, list[Tensor]] = {}
        """Tensors of the queries (False) and of the keys (True) with room for all tokens."""
        self._loaded: set[tuple[bool, range]] = set()
        """Tokens of these tensors that have been copied."""

    def load(
        self, sent: Sequence[Sent], ranges: Collection[range], seqlen: int, *, is_of_keys: bool
    ) -> None:
        """Copy tokens to the GPU for all tasks; see :meth:`Inputs.load`."""
        missing = [tokens for tokens in ranges if (is_of_keys, tokens) not in self._loaded]
        # Adjacent ranges are copied at once if one tensor includes them.
        for tokens in join_ranges(missing) if len(sent) == 1 else missing:
            stored = find_rows(sent, tokens)
            if is_of_keys not in self._whole:
                self._whole[is_of_keys] = [self._make_whole(item, seqlen) for _, item in stored]
            for (rows, item), whole in zip(stored, self._whole[is_of_keys], strict=True):
                if not self._is_here(item):
                    self._fill(_rows(whole, tokens), self.tensor(item)[:, :, rows])
        self._loaded.update((is_of_keys, tokens) for tokens in missing)

    def hold(
        self,
        sent: Sequence[Sent],
        ranges: tuple[range, ...],
        *,
        is_of_keys: bool,
        must_join: bool,
    ) -> tuple[list[HeldTokens], int]:
        """Return the tokens that a task holds, in one tensor; see :meth:`Inputs.hold`.

        Tiles of kernels depend on which rows are adjacent. A task therefore gets the rows of its
        own tokens alone, whether others are on the GPU or not.
        """
        lengths = list(map(len, ranges))
        is_loaded = all((is_of_keys, tokens) in self._loaded for tokens in ranges)
        parts = [
            [_rows(whole, tokens) for whole in self._whole[is_of_keys]]
            if is_loaded
            else [self.tensor(item)[:, :, rows] for rows, item in find_rows(sent, tokens)]
            for tokens in ranges
        ]
        if is_loaded and len(ranges) == 1:
            held = [HeldTokens(rows, ranges) for rows in parts[0]]
            return held, sum(rows.nbytes for rows in parts[0])
        held = []
        for tensors in zip(*parts, strict=True):
            packed = self._empty_like(tensors[0], sum(lengths))
            for place, rows in zip(packed.split(lengths, dim=2), tensors, strict=True):
                self._fill(place, rows)
            held.append(HeldTokens(packed, ranges))
        return held, 0

    def bring(self, sent: Blob | SharedTensor) -> Tensor:
        """Return a tensor on this GPU, or on one that it reads; see :meth:`Inputs.bring`."""
        tensor = self.tensor(sent)
        if tensor.is_cuda:
            return tensor
        place = self._empty_like(tensor, tensor.shape[2])
        self._fill(place, tensor)
        return place

    def clear(self) -> None:
        """Free all copies."""
        self._whole.clear()
        self._loaded.clear()

    def _is_here(self, sent: Blob | SharedTensor) -> bool:
        return not isinstance(sent, Blob) and sent.is_on(self._device)

    def _make_whole(self, sent: Blob | SharedTensor, seqlen: int) -> Tensor:
        if self._is_here(sent):
            return self.tensor(sent)
        return self._empty_like(self.tensor(sent), seqlen)

    def _empty_like(self, rows: Tensor, number: int) -> Tensor:
        batch, heads, _, *dim = rows.shape
        return torch.empty((batch, heads, number, *dim), dtype=rows.dtype, device=self._device)

    def _fill(self, place: Tensor, rows: Tensor) -> None:
        """Copy rows of host memory, or of a GPU, to a place on this GPU."""
        if rows.is_cuda:
            place.copy_(rows)
            return
        free = self._copies.record_event()
        for batch, target in enumerate(place):
            where = RowsOfHeads(batch, range(target.shape[0]), range(target.shape[1]))
            self._copies.upload(rows, where, target, free)


def _rows(whole: Tensor, tokens: range) -> Tensor:
    return whole[:, :, tokens.start : tokens.stop]
