"""Where the rows of a rank lie in the sequence, and those of its tensor-parallel group together."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cqs.distributed.agreement import agree
from cqs.uncompiled import uncompiled


@uncompiled
def find_tokens(shard: Tensor, mesh: DeviceMesh | None) -> range:
    """Return the positions of what the ranks of this tensor axis have together.

    Every rank of the mesh calls this. Numbers travel between CPUs; GPUs are not waited for.

    Args:
        shard: ``[batch, rows, ...]``: the rows of this rank.
        mesh: Of the axes sequence and tensor; ``None``: the rows are all there are.

    Raises:
        TypeError: if the shard is no tensor; ValueError on all other ranks.
        ValueError: on every rank, if shards differ in more than their rows, are elsewhere than the
            mesh, are empty, or are not cut over the tensor axis as ``torch.chunk`` cuts.
    """
    if mesh is None:
        return range(shard.shape[1])
    request: dict[str, Any] | None = None
    error: Exception | None = None
    try:
        _check_shard(shard, mesh)
        request = {
            "call": "a layer",
            "dtype": shard.dtype,
            "batch": shard.shape[0],
            "size": tuple(shard.shape[2:]),
        }
    except (TypeError, ValueError) as wrong:
        error = wrong
    rows: tuple[int, ...] = ()
    try:
        length = 0 if request is None else shard.shape[1]
        rows = agree(mesh.get_group("tensor"), request, error, seqlen_q=length).seqlens_q
        _check_chunks(rows)
    except (RuntimeError, TypeError, ValueError) as wrong:
        error = wrong  # ranks of other tensor axes wait for this one
    group = mesh.get_group("sequence")
    of_groups = agree(group, request, error, seqlen_q=sum(rows)).seqlens_q
    first = sum(of_groups[: dist.get_rank(group)])
    return range(first, first + sum(rows))


def _check_shard(shard: Tensor, mesh: DeviceMesh) -> None:
    if not isinstance(shard, Tensor):
        raise TypeError(f"the input must be a tensor, got {type(shard).__name__}")
    if isinstance(shard, DTensor):
        raise TypeError("hidden must be a plain torch.Tensor, got DTensor: pass hidden.to_local()")
    if shard.device.type != mesh.device_type:
        raise ValueError(f"the mesh is of {mesh.device_type}, the input on {shard.device}")
    if shard.ndim < 2 or not shard.shape[0]:
        shape = tuple(shard.shape)
        raise ValueError(f"the input must be [batch of at least 1, rows, ...], got {shape}")


def _check_chunks(rows: tuple[int, ...]) -> None:
    length = -(-sum(rows) // len(rows))
    if 0 in rows:
        raise ValueError(f"every rank needs rows, a tensor axis has {rows}: the mesh is too large")
    if any(mine != min(length, sum(rows[i:])) for i, mine in enumerate(rows)):
        raise ValueError(f"along the tensor axis rows must be cut as torch.chunk cuts, got {rows}")


def gather(shard: Tensor, tokens: range, mesh: DeviceMesh | None) -> Tensor:
    """Return the rows of all ranks of the tensor axis; their gradients are summed and cut again.

    Args:
        shard: ``[batch, rows, size]``.
        tokens: What :func:`find_tokens` returned.
        mesh: Likewise; ``None`` returns the shard.

    Returns:
        ``[batch, len(tokens), size]``, a DTensor for :class:`~cqs.nn.ColumnParallelLinear`.
    """
    if mesh is None:
        return shard
    batch, _, size = shard.shape
    whole = DTensor.from_local(
        shard,
        mesh["tensor"],
        [Shard(1)],
        run_check=False,
        shape=torch.Size((batch, len(tokens), size)),
        stride=(len(tokens) * size, size, 1),
    )
    return whole.redistribute(placements=[Replicate()])
