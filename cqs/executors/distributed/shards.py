"""This rank's shards: process groups of meshes, DTensors, and joint tokens beside the shards.

Every rank has a copy of joint tokens, which come before or after the sharded sequence.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.arguments import as_bool
from cqs.partial import Partial
from cqs.problem.options import AttentionOptions
from cqs.problem.scores import Scores
from cqs.problem.tensors import autocast

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

POSITIONS = "front", "rear"
"""Places of the joint tokens: before the tokens of rank 0, or after those of the last rank."""
_UNORDERED = "sinks", "softcap"
"""Options of :class:`cqs.Scores` that do not depend on the positions of tokens."""
_NAMES = "query", "key", "value"


@dataclass(frozen=True, eq=False)
class JointTokens:
    """Tokens of which every rank has a copy, for example text beside a video, or registers.

    They come before or after the shards in the whole sequence, and each of their queries is
    computed once. Tensors are plain or DTensors with the placements ``[Replicate()]``. Their
    gradient on a rank is its share, as with sinks: the sum over the ranks is the gradient of the
    sum of their losses.
    """

    query: Tensor | None = None
    """``[batch or 1, num_heads, any length, head_dim]``, the same on all ranks, or ``None``."""
    key: Tensor | None = None
    """``[batch or 1, num_kv_heads, any length, head_dim]``, or ``None``. There may be joint keys
    without joint queries."""
    value: Tensor | None = None
    """``[batch or 1, num_kv_heads, length of key, value_dim]``, or ``None``."""
    position: str = "front"
    """``"front"`` if joint tokens come before the tokens of rank 0, ``"rear"`` if they come after
    those of the last rank. Masks count positions in this order."""


class JointRows(NamedTuple):
    """Position and numbers of the joint tokens of a call, which are equal on all ranks."""

    position: str
    queries: int
    keys: int


NO_ROWS = JointRows("front", 0, 0)


class JointParts:
    """The joint tokens of a call, and the part of them that joins the shard of this rank.

    Attention in which positions do not matter takes a near-equal part of them on every rank. In
    other calls they are the first tokens of rank 0, or the last ones of the last rank.
    """

    def __init__(self, joint: JointTokens, group: Any) -> None:
        """Check the joint tokens of a call.

        Args:
            joint: The joint tokens.
            group: Process group of the ranks.
        """
        if not isinstance(joint, JointTokens):
            raise TypeError(f"joint must be JointTokens or None, got {joint!r}")
        if joint.position not in POSITIONS:
            raise ValueError(f"joint.position must be 'front' or 'rear', got {joint.position!r}")
        if (joint.key is None) != (joint.value is None):
            missing = "joint.key" if joint.key is None else "joint.value"
            raise ValueError(
                f"joint.key and joint.value must be given together, got {missing}=None"
            )
        tensors = zip(_NAMES, autocast(joint.query, joint.key, joint.value), strict=True)
        self._tensors = [to_local_copy(f"joint.{name}", tensor) for name, tensor in tensors]
        lengths = [_num_rows(*named) for named in zip(_NAMES, self._tensors, strict=True)]
        if lengths[1] != lengths[2]:
            raise ValueError(
                f"joint.value must have the rows of joint.key, {lengths[1]}, got {lengths[2]}"
            )
        self.rows = JointRows(joint.position, lengths[0], lengths[1])
        self._is_ordered = False
        """Whether positions matter, so that one rank has all joint tokens; see :meth:`join`."""
        self._group: Any = dist.group.WORLD if group is None else group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def join(
        self, shards: tuple[Tensor, ...], options: AttentionOptions
    ) -> tuple[tuple[Tensor, ...], AttentionOptions]:
        """Return this rank's query, key and value with its part of the joint tokens, and options.

        It also decides whether positions matter, for :meth:`gather`.

        Args:
            shards: Query, key and value of this rank.
            options: The options of the call, which decide whether positions matter. A bias has rows
                of all joint queries; the returned one has those of this rank's.
        """
        if not all(map(_is_dense, shards)):
            return shards, options  # the checks of the call reject them
        scores = options.get("scores")
        terms = vars(scores) if isinstance(scores, Scores) else {}
        self._is_ordered = (
            as_bool("is_causal", options.get("is_causal", False))
            or options.get("pattern") is not None
            or bool(options.get("dropout_p", 0.0))
            or as_bool("verify", options.get("verify", False))  # errors name positions
            or as_bool("reproducible", options.get("reproducible", False))
            or any(terms[name] is not None for name in terms if name not in _UNORDERED)
        )
        joined = tuple(
            shard if tokens is None else self._join(name, shard, tokens)
            for name, shard, tokens in zip(_NAMES, shards, self._tensors, strict=True)
        )
        number, has_joint_queries = self.rows.queries, joined[0].shape[2] > shards[0].shape[2]
        if scores is None or has_joint_queries or not number or not _has_rows(terms.get("bias")):
            return joined, options
        rows = slice(number, None) if self.rows.position == "front" else slice(-number)
        own_scores = replace(scores, bias=terms["bias"][..., rows, :])
        return joined, {**options, "scores": own_scores}

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

    def gather(self, answer: Partial, *, with_lse: bool) -> Partial:
        """Return a result with the rows of all joint queries in place of this rank's part."""
        output, lse = answer
        return Partial(self._gather(output), self._gather(lse) if with_lse else lse)

    def _gather(self, answer: Tensor) -> Tensor:
        """Gather the joint rows of a tensor of joined shards, ``[batch, num_heads, rows, ...]``.

        The gradient of its joint rows is the sum of those of all ranks, added in the order of the
        ranks.
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
        received = all_to_all_single_autograd(
            copies.flatten(0, 1).contiguous(), lengths, [own] * self._num_ranks, self._group
        )
        joint = received.movedim(0, 2)
        return torch.cat((joint, rows) if is_front else (rows, joint), dim=2)


def _is_dense(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.ndim == 4


def _has_rows(bias: Tensor | None) -> bool:
    return isinstance(bias, Tensor) and bias.ndim > 1 and bias.shape[-2] != 1


def _num_rows(name: str, tokens: Tensor | None) -> int:
    if tokens is None:
        return 0
    if not _is_dense(tokens):
        got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise (ValueError if isinstance(tokens, Tensor) else TypeError)(
            f"joint.{name} must be a dense tensor [batch, heads, rows, dim] or None, got {got}"
        )
    return tokens.shape[2]


def _check_like(name: str, tokens: Tensor, shard: Tensor) -> None:
    """Raise ValueError unless joint tokens can be concatenated with a shard."""
    for attribute in "dtype", "device":
        wanted, got = getattr(shard, attribute), getattr(tokens, attribute)
        if got != wanted:
            raise ValueError(
                f"joint.{name} must have the {attribute} of {name}, {wanted}, got {got}"
            )
    batch, heads, _, dim = shard.shape
    if tokens.shape[0] not in (1, batch) or (tokens.shape[1], tokens.shape[3]) != (heads, dim):
        raise ValueError(
            f"joint.{name} must be [{batch} or 1, {heads}, any length, {dim}] like {name}, got "
            f"{list(tokens.shape)}"
        )


def group_of(group: Any, query: Any) -> Any:
    """Return the process group of the argument ``group``, which may be a 1-D device mesh.

    Without one, the group is that of the mesh of ``query`` if it is a DTensor.

    Raises:
        ValueError: The mesh has several dimensions.
    """
    if group is None and hasattr(query, "placements"):
        group = query.device_mesh
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"group must be a 1-D device mesh, got {group}: pass one of its dimensions, mesh[name]"
        )
    return group.get_group()


def to_local(*tensors: Tensor) -> "tuple[tuple[Tensor, ...], DeviceMesh | None]":
    """Return this rank's shards of query, key and value, and the mesh if they are DTensors.

    Raises:
        ValueError: They are DTensors on different meshes, or not sharded on the sequence alone.
    """
    if not all(hasattr(tensor, "placements") for tensor in tensors):
        return tensors, None
    from torch.distributed.tensor import Shard

    shards: Any = tensors
    mesh = shards[0].device_mesh
    for name, shard in zip(("query", "key", "value"), shards, strict=True):
        if shard.device_mesh != mesh or shard.placements != (Shard(2),):
            raise ValueError(
                f"{name} must have the mesh of query, 1-D, and the placements (Shard(2),), got "
                f"{shard.placements} on {shard.device_mesh}"
            )
    return tuple(shard.to_local(grad_placements=[Shard(2)]) for shard in shards), mesh


def to_local_copy(name: str, tensor: Any) -> Any:
    """Return this rank's copy of a DTensor that is replicated; other arguments as they are.

    The gradients of the copies are those of the ranks, which DTensor adds up.

    Raises:
        ValueError: It is not replicated on a 1-D mesh.
    """
    if not hasattr(tensor, "placements"):
        return tensor
    from torch.distributed.tensor import Partial as Share
    from torch.distributed.tensor import Replicate

    if tensor.placements != (Replicate(),):
        raise ValueError(
            f"{name} must be a plain tensor or a DTensor with the placements (Replicate(),), got "
            f"{tensor.placements}"
        )
    return tensor.to_local(grad_placements=[Share()])


def as_dtensors(answer: Partial, query: Tensor, mesh: "DeviceMesh") -> Partial:
    """Return the DTensors of the shards of a result, with the rows of ``query``.

    Args:
        answer: Output and LSE of this rank's queries.
        query: The DTensor ``query``.
        mesh: Its mesh.
    """
    from torch.distributed.tensor import DTensor, Shard

    def distribute(shard: Tensor) -> Tensor:
        shape = torch.Size((*shard.shape[:2], query.shape[2], *shard.shape[3:]))
        options: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        return DTensor.from_local(shard, mesh, [Shard(2)], run_check=False, **options)

    return Partial(*map(distribute, answer))
