"""One cheap collective by which ranks find out that they do not ask for the same."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_control_groups: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()


class Shards(NamedTuple):
    """What ranks learn of each other."""

    seqlens_q: tuple[int, ...]
    seqlens_kv: tuple[int, ...]
    seed: int
    """That of rank 0."""


def agree(
    group: Any,
    request: Mapping[str, Any] | None,
    error: Exception | None,
    *,
    seqlen_q: int = 0,
    seqlen_kv: int = 0,
    seed: int = 0,
) -> Shards:
    """Compare requests; every rank of the group must call this. GPUs are not waited for.

    Args:
        group: The process group.
        request: What must be the same everywhere, by name; ``None`` where this rank has an error.
        error: What is wrong with this rank's arguments, if anything.
        seqlen_q: Queries of this rank's shard.
        seqlen_kv: Its keys.
        seed: What this rank would draw dropout from; less than 2^63.

    Raises:
        Exception: ``error``, if there is one.
        ValueError: if another rank has an error or another request; names the rank.
        RuntimeError: if a rank has died, or does not answer within the time-out of the group.
    """
    request = {name: repr(value) for name, value in (request or {}).items()}  # equal if they are
    digest = hashlib.blake2b(repr(request).encode(), digest_size=7).digest()
    mine = [error is not None, int.from_bytes(digest), seqlen_q, seqlen_kv, seed]
    own = torch.tensor([mine] * dist.get_world_size(group), dtype=torch.int64, device="cpu")
    gathered = torch.empty_like(own)
    control = _control_group(group)
    try:
        dist.all_to_all_single(gathered, own, group=control)  # a dead rank fails it on all others
    except RuntimeError as lost:
        raise RuntimeError(
            "not all ranks of the group answer: one has died, or does not call attention"
        ) from lost
    table = gathered.tolist()
    if any(failed for failed, *_ in table) or any(row[1] != table[0][1] for row in table):
        _explain(control, request, error)
    return Shards(tuple(row[2] for row in table), tuple(row[3] for row in table), table[0][4])


def _control_group(group: Any) -> Any:
    """Return a group of the same ranks that takes tensors of the CPU."""
    group = group or dist.group.WORLD
    if "cpu:" in dist.get_backend_config(group):
        return group
    if group not in _control_groups:
        ranks = dist.get_process_group_ranks(group)
        _control_groups[group] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True
        )
    return _control_groups[group]


def _explain(group: Any, request: dict[str, Any], error: Exception | None) -> None:
    """Gather what was asked and raise the error that says whose differs."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (request, None if error is None else repr(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(found):
        if message is not None:
            raise ValueError(f"rank {rank} of the group failed: {message}")
    first = found[0][0]
    for rank, (other, _) in enumerate(found):
        for name, value in other.items():
            if value != first[name]:
                raise ValueError(
                    f"rank {rank} of the group has {name} {value}, rank 0 has {first[name]}"
                )
