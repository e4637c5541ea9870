"""Tokens that an actor reads: from memory of its host or of GPUs there, or the object store."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.tasks.shared_memory import OpenedMemory, SharedTensor
from cqs.executors.streaming.plan import RowsOfHeads
from cqs.executors.streaming.transfers import DeviceCopies
from cqs.worker import HeldTokens, join_rows

Sent = tuple[range, Sequence[Blob | SharedTensor]]
"""Tokens, and the rows of these tokens in each of several tensors."""


class Inputs:
    """Provides the tokens that tasks hold. Memory that the device has already is read in place."""

    def __init__(self, copies: DeviceCopies):
        """Start without tokens.

        Args:
            copies: Copies memory of the host to the device of the actor.
        """
        self._copies, self._device = copies, copies.device
        self._memory = OpenedMemory(copies.device)
        self._rows: dict[tuple[bool, range], list[Tensor]] = {}
        """Rows of several tensors on the device, by side and tokens."""

    def tensor(self, sent: Blob | SharedTensor) -> Tensor:
        """Return a tensor of another process, in memory that both processes access.

        Raises:
            MemoryNotSharedError: The memory of the other process cannot be accessed.
        """
        return sent.tensor() if isinstance(sent, Blob) else self._memory.tensor(sent)

    def bring(self, sent: Blob | SharedTensor) -> Tensor:
        """Return a tensor of another process that kernels can read: on the device or another GPU.

        Args:
            sent: The tensor, ``[batch, heads, rows, ...]``.
        """
        tensor = self.tensor(sent)
        return tensor if tensor.device.type == self._device.type else self._copy(tensor)

    def load(self, sent: Sequence[Sent], ranges: Collection[range], *, is_of_keys: bool) -> None:
        """Bring tokens to the device, where they stay until :meth:`clear`.

        Args:
            sent: Tensors that include the tokens.
            ranges: The tokens.
            is_of_keys: Whether the tensors are those of the keys, or of the queries.
        """
        for tokens in ranges:
            if (is_of_keys, tokens) in self._rows:
                continue
            first, items = next((all_[0], items) for all_, items in sent if tokens.start in all_)
            loaded = list[Tensor]()
            for item in items:
                rows = self.tensor(item)[:, :, tokens.start - first : tokens.stop - first]
                is_here = isinstance(item, SharedTensor) and item.is_on(self._device)
                loaded.append(rows if is_here or self._device.type == "cpu" else self._copy(rows))
            self._rows[is_of_keys, tokens] = loaded

    def hold(
        self, ranges: tuple[range, ...], *, is_of_keys: bool, must_join: bool
    ) -> tuple[list[HeldTokens], int]:
        """Return the tokens that a task holds.

        Args:
            ranges: The tokens, which are loaded.
            is_of_keys: Whether the tensors are those of the keys, or of the queries.
            must_join: Whether the rows of all ranges must be in one tensor, without those of other
                tokens, because tiles of kernels depend on which rows are adjacent.

        Returns:
            The tokens in each tensor, and the bytes of those that this call has not copied.
        """
        parts = zip(*(self._rows[is_of_keys, tokens] for tokens in ranges), strict=True)
        if must_join and len(ranges) > 1:
            return [HeldTokens(join_rows(rows), ranges) for rows in parts], 0
        held = [HeldTokens(None, ranges, rows) for rows in parts]
        return held, sum(tokens.nbytes for tokens in held)

    def clear(self) -> None:
        """Discard all tokens."""
        self._rows.clear()

    def close(self) -> None:
        """Close memory of other processes; the next run opens it again."""
        self._memory.close()

    def _copy(self, rows: Tensor) -> Tensor:
        """Return a copy of rows of host memory, or of another GPU, on the device."""
        place = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
        if rows.is_cuda:
            return place.copy_(rows)
        free = self._copies.record_event()
        for batch, target in enumerate(place):
            where = RowsOfHeads(batch, range(target.shape[0]), range(target.shape[1]))
            self._copies.upload(rows, where, target, free)
        return place
