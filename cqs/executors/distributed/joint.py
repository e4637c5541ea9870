"""Joint tokens: tokens of which every rank has a copy, before or after the sharded sequence."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.arguments import as_bool
from cqs.executors.distributed.dtensors import to_local_copy
from cqs.problem.scores import Scores
from cqs.problem.tensors import autocast

POSITIONS = "front", "rear"
"""Places of the joint tokens: before the tokens of rank 0, or after those of the last rank."""
_UNORDERED = "sinks", "softcap"
"""Options of :class:`cqs.Scores` that do not depend on the positions of tokens."""
_NAMES = "query", "key", "value"


class JointRows(NamedTuple):
    """Position and numbers of the joint tokens of a call, which are equal on all ranks."""

    position: str
    queries: int
    keys: int


class JointTokens:
    """The joint tokens of a call, and the part of them that joins the shard of this rank.

    Attention in which positions do not matter takes a near-equal part of them on every rank. In
    other calls they are the first tokens of rank 0, or the last ones of the last rank.
    """

    def __init__(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        position: str | JointRows,
        group: Any,
    ) -> None:
        """Take the arguments of :func:`cqs.distributed.attention`.

        Args:
            query: ``[batch or 1, num_heads, any rows, head_dim]``, equal on all ranks, or ``None``.
            key: ``[batch or 1, num_kv_heads, any rows_kv, head_dim]``, or ``None``.
            value: ``[batch or 1, num_kv_heads, any rows_kv, value_dim]``, or ``None``.
            position: ``"front"`` or ``"rear"``; :class:`JointRows` if the shards of the call have
                joint tokens already.
            group: Process group of the ranks.
        """
        if isinstance(position, JointRows):
            self.rows, self._tensors = position, (None, None, None)
            return
        if position not in POSITIONS:
            raise ValueError(f"joint_position must be 'front' or 'rear', got {position!r}")
        if (key is None) != (value is None):
            missing = "joint_key" if key is None else "joint_value"
            raise ValueError(
                f"joint_key and joint_value must be given together, got {missing}=None"
            )
        self._tensors = tuple(
            to_local_copy(f"joint_{name}", tensor)
            for name, tensor in zip(_NAMES, autocast(query, key, value), strict=True)
        )
        numbers = [_num_rows(name, each) for name, each in zip(_NAMES, self._tensors, strict=True)]
        if numbers[1] != numbers[2]:
            raise ValueError(
                f"joint_value must have the rows of joint_key, {numbers[1]}, got {numbers[2]}"
            )
        self.rows = JointRows(position, numbers[0], numbers[1])
        self._group = dist.group.WORLD if group is None else group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def are_given(self) -> bool:
        """Whether there are joint tokens that must join the shards."""
        return any(each is not None for each in self._tensors)

    def join(
        self,
        shards: tuple[Tensor, ...],
        scores: Scores | None,
        is_causal: bool,
        pattern: Any,
        dropout_p: float,
        verify: bool,
    ) -> tuple[tuple[Tensor, ...], Scores | None]:
        """Return this rank's query, key and value with its part of the joint tokens, and scores.

        Args:
            shards: Query, key and value of this rank.
            scores: Options of the scores, or ``None``. A bias has rows of all joint queries.
            is_causal: Options of the call, which decide whether positions matter.
            pattern: Sparse pattern, or ``None``.
            dropout_p: Probability that a pair is dropped.
            verify: Whether rows are verified; errors name their positions.
        """
        if not (self.are_given and all(map(_is_dense, shards))):
            return shards, scores  # the checks of the call reject other shards
        terms = vars(scores) if isinstance(scores, Scores) else {}
        self._is_ordered = (
            as_bool("is_causal", is_causal)
            or pattern is not None
            or bool(dropout_p)
            or as_bool("verify", verify)
            or any(terms[name] is not None for name in terms if name not in _UNORDERED)
        )
        joined = tuple(
            shard if tokens is None else self._join(name, shard, tokens)
            for name, shard, tokens in zip(_NAMES, shards, self._tensors, strict=True)
        )
        number, is_owner = self.rows.queries, joined[0].shape[2] > shards[0].shape[2]
        if scores is None or is_owner or not number or not _has_rows(terms.get("bias")):
            return joined, scores
        rows = slice(number, None) if self.rows.position == "front" else slice(-number)
        return joined, replace(scores, bias=terms["bias"][..., rows, :])

    def _join(self, name: str, shard: Tensor, tokens: Tensor) -> Tensor:
        _check_like(name, tokens, shard)
        # Also an empty part: either all ranks record gradients or none does.
        first, stop = self._bounds(tokens.shape[2])[self._rank : self._rank + 2]
        part = tokens[:, :, first:stop].expand(shard.shape[0], -1, -1, -1)
        return torch.cat((part, shard) if self.rows.position == "front" else (shard, part), dim=2)

    def _bounds(self, number: int) -> list[int]:
        """Return the first joint token of every rank's part, and the end of the last part."""
        num_ranks = self._num_ranks
        if not self._is_ordered:
            return [rank * number // num_ranks for rank in range(num_ranks + 1)]
        if self.rows.position == "front":
            return [0] + [number] * num_ranks
        return [0] * num_ranks + [number]

    def gather(self, answer: Tensor) -> Tensor:
        """Return a result with the rows of all joint queries in place of this rank's part.

        Args:
            answer: ``[batch, num_heads, part + rows]`` or ``[..., value_dim]``, of joined shards.
                The gradient of its joint rows is the sum of those of all ranks, added in the order
                of the ranks.
        """
        tokens = self._tensors[0]
        if tokens is None or not tokens.shape[2] or self._num_ranks == 1:
            return answer
        bounds = self._bounds(tokens.shape[2])
        lengths = [stop - first for first, stop in zip(bounds, bounds[1:], strict=False)]
        own, is_front = lengths[self._rank], self.rows.position == "front"
        sizes = [own, answer.shape[2] - own]
        parts = answer.split_with_sizes(sizes if is_front else sizes[::-1], dim=2)
        part, rows = parts if is_front else parts[::-1]
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        # Its backward pass sends the gradients back, which autograd sums over the copies.
        copies = part.movedim(2, 0).expand(self._num_ranks, own, *part.shape[:2], *part.shape[3:])
        # Of a part of one row, `flatten` returns a view with a stride of 0, which NCCL rejects.
        found = all_to_all_single_autograd(
            copies.flatten(0, 1).contiguous(), lengths, [own] * self._num_ranks, self._group
        )
        joint = found.movedim(0, 2)
        return torch.cat((joint, rows) if is_front else (rows, joint), dim=2)


def _is_dense(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.ndim == 4


def _has_rows(bias: Tensor | None) -> bool:
    return isinstance(bias, Tensor) and bias.ndim > 1 and bias.shape[-2] != 1


def _num_rows(name: str, tokens: Tensor | None) -> int:
    if tokens is None:
        return 0
    if not _is_dense(tokens):
        found = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise (ValueError if isinstance(tokens, Tensor) else TypeError)(
            f"joint_{name} must be a dense tensor [batch, heads, rows, dim] or None, got {found}"
        )
    return tokens.shape[2]


def _check_like(name: str, tokens: Tensor, shard: Tensor) -> None:
    """Raise ValueError unless joint tokens can be concatenated with a shard."""
    for attribute in "dtype", "device":
        wanted, found = getattr(shard, attribute), getattr(tokens, attribute)
        if found != wanted:
            raise ValueError(
                f"joint_{name} must have the {attribute} of {name}, {wanted}, got {found}"
            )
    batch, heads, _, dim = shard.shape
    if tokens.shape[0] not in (1, batch) or (tokens.shape[1], tokens.shape[3]) != (heads, dim):
        raise ValueError(
            f"joint_{name} must be [{batch} or 1, {heads}, any length, {dim}] like {name}, got "
            f"{list(tokens.shape)}"
        )
