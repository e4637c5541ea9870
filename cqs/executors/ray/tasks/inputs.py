"""Tokens that an actor reads: from memory of its host or of its GPUs, or the object store."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.tasks.shared_memory import OpenedMemory, SharedTensor
from cqs.worker import HeldTokens

Sent = tuple[range, Sequence[Blob | SharedTensor]]
"""Tokens, and the rows of these tokens in each of several tensors."""


class Inputs:
    """Provides the tokens that tasks hold, on a CPU: shared memory is read in place."""

    def __init__(self, device: torch.device):
        """Start without tokens.

        Args:
            device: The device of the actor.
        """
        self._device, self._memory = device, OpenedMemory(device)

    def tensor(self, sent: Blob | SharedTensor) -> Tensor:
        """Return a tensor of another process, in memory that both processes access.

        Raises:
            MemoryNotSharedError: The memory of the other process cannot be accessed.
        """
        return sent.tensor() if isinstance(sent, Blob) else self._memory.tensor(sent)

    def load(
        self, sent: Sequence[Sent], ranges: Collection[range], seqlen: int, *, is_of_keys: bool
    ) -> None:
        """Copy tokens to the device, where they stay until :meth:`clear`.

        Args:
            sent: Tensors that include the tokens.
            ranges: The tokens.
            seqlen: Number of all tokens of the tensors.
            is_of_keys: Whether the tensors are those of the keys, or of the queries.
        """

    def hold(
        self,
        sent: Sequence[Sent],
        ranges: tuple[range, ...],
        *,
        is_of_keys: bool,
        must_join: bool,
    ) -> tuple[list[HeldTokens], int]:
        """Return the tokens that a task holds.

        Args:
            sent: Tensors that include the tokens.
            ranges: The tokens.
            is_of_keys: Whether the tensors are those of the keys, or of the queries.
            must_join: Whether the rows of all ranges must be in one tensor.

        Returns:
            The tokens in each tensor, and the bytes of those that this call has not copied.
        """
        parts = [
            [self.tensor(item)[:, :, rows] for rows, item in find_rows(sent, tokens)]
            for tokens in ranges
        ]
        if must_join and len(ranges) > 1:
            joined = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
            return [HeldTokens(rows, ranges) for rows in joined], 0
        held = [HeldTokens(None, ranges, rows) for rows in zip(*parts, strict=True)]
        return held, sum(tensor.nbytes for part in parts for tensor in part)

    def bring(self, sent: Blob | SharedTensor) -> Tensor:
        """Return a tensor of another process that kernels can read: on the device, or on its peer.

        Args:
            sent: The tensor, ``[batch, heads, rows, ...]``.
        """
        return self.tensor(sent)

    def clear(self) -> None:
        """Discard all copies of tokens."""

    def close(self) -> None:
        """Close memory of other processes; the next run opens it again."""
        self._memory.close()


def find_rows(sent: Sequence[Sent], tokens: range) -> list[tuple[slice, Blob | SharedTensor]]:
    """Return the rows of some tokens, and the tensors that include them."""
    all_tokens, tensors = next(entry for entry in sent if tokens.start in entry[0])
    rows = slice(tokens.start - all_tokens.start, tokens.stop - all_tokens.start)
    return [(rows, tensor) for tensor in tensors]
