"""The one call that training code needs: shards in, shards out, gradients too."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cqs.autograd import attend_differentiably
from cqs.distributed.agreement import agree
from cqs.distributed.exchange import send_back, send_out
from cqs.distributed.layout import (
    Layout,
    choose_head_parallel,
    lay_out,
    why_not_head_parallel,
)
from cqs.gradients import Gradients
from cqs.partial import Partial, lse_dtype, merge_rows
from cqs.patterns import Pattern
from cqs.problem import GPU_TILE, Problem, check_pattern, check_problem
from cqs.scheduler.arguments import as_bool, as_integer
from cqs.worker import HeldTokens, Worker
from cqs.worker.backends import check_backend_name


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "dist.ProcessGroup | None" = None,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    head_parallel: int | str = "auto",
    interest_set: Iterable[int] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence that is spread over the ranks of a group.

    Every rank of the group calls this with its shard, a contiguous part of the sequence: rank 0 has
    the first tokens, the last rank the last. Shards may differ in length, and may be empty. Each
    rank gets the answer for its own queries, and its own gradients. Positions stay where they are,
    causal or not: there is no zig-zag.

    Tokens travel once to whom the plan lets compute with them, partial results once back; ranks do
    not wait for each other's computation. The result has the same bits in every run.

    Args:
        query: ``[batch, num_heads, rows, head_dim]``, as for :func:`cqs.attention`.
        key: ``[batch, num_kv_heads, rows of keys, head_dim]``.
        value: ``[batch, num_kv_heads, rows of keys, value_dim]``.
        group: The process group; ``None`` means the default group.
        is_causal: As for :func:`cqs.attention`, over the whole sequence.
        pattern: Likewise.
        scale: Likewise.
        dropout_p: Likewise: the same pairs are dropped as in one process with this seed.
        seed: Likewise; of ``None`` all ranks take what rank 0 draws.
        head_parallel: Into how many equal slices to cut the heads, each for ``ranks /
            head_parallel`` ranks that share the sequence by a cyclic quorum set. 1 is quorums
            alone; the number of ranks is what Ulysses does (Jacobs et al., arXiv 2309.14509).
            ``"auto"`` takes the number for which a rank holds the fewest bytes.
        interest_set: For ``ranks / head_parallel`` workers; see :func:`cqs.make_plan`.
        backend: As for :func:`cqs.attention`.
        return_lse: Likewise.

    Returns:
        ``output``, ``[batch, num_heads, rows, value_dim]``; with ``return_lse`` also ``lse``.

    Raises:
        RuntimeError: if torch.distributed is not initialized or this process not in the group.
        TypeError: as for :func:`cqs.attention`.
        ValueError: likewise; and if another rank's arguments are wrong or not the same, with the
            number of that rank, on every rank.
        NotImplementedError: as for :func:`cqs.attention`.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call init_process_group first")
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise RuntimeError("this process is not in the group")
    problem: Problem | None = None
    request: dict[str, Any] | None = None
    error: Exception | None = None
    try:
        problem = check_problem(query, key, value, scale=scale, dropout_p=dropout_p, seed=seed)
        check_backend_name(backend)
        if pattern is not None and not isinstance(pattern, Pattern):
            raise TypeError(f"pattern must be of cqs.patterns, got {type(pattern).__name__}")
        request = {
            "batch": query.shape[0],
            "num_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "head_dim": query.shape[3],
            "value_dim": value.shape[3],
            "dtype": query.dtype,
            "device": query.device.type,
            "requires_grad": torch.is_grad_enabled()
            and any(tensor.requires_grad for tensor in (query, key, value)),
            "is_causal": as_bool("is_causal", is_causal),
            "pattern": pattern,
            "scale": problem.scale,
            "dropout_p": dropout_p,
            "seed": seed,
            "head_parallel": _check_head_parallel(head_parallel, num_ranks, problem, pattern),
            "interest_set": None if interest_set is None else tuple(interest_set),
            "backend": backend,
        }
    except Exception as wrong:
        error = wrong  # the others wait for this rank, so it must tell them
    shards = agree(
        group,
        request,
        error,
        seqlen_q=0 if problem is None else query.shape[2],
        seqlen_kv=0 if problem is None else key.shape[2],
        seed=0 if problem is None or problem.dropout is None else problem.dropout.seed,
    )
    assert problem is not None and request is not None
    batch, num_heads, *_ = query.shape
    lengths = sum(shards.seqlens_q), sum(shards.seqlens_kv)
    is_causal, pattern = check_pattern(pattern, request["is_causal"], batch, num_heads, *lengths)
    problem = replace(
        problem,
        is_causal=is_causal,
        pattern=pattern,
        dropout=problem.dropout and replace(problem.dropout, seed=shards.seed),
    )

    def share_of(part: Problem) -> _Share:
        """Return what this rank does of a problem all of whose heads have one pattern."""
        layout = lay_out(
            shards.seqlens_q,
            shards.seqlens_kv,
            rank,
            num_heads=part.query.shape[1],
            num_kv_heads=part.key.shape[1],
            head_parallel=request["head_parallel"],
            is_causal=part.is_causal,
            pattern=part.pattern,
            interest_set=request["interest_set"],
            tile=GPU_TILE if part.query.is_cuda else 1,
        )
        dropout = part.dropout and part.dropout.moved(0, layout.query_heads[rank].start)
        bound = None if part.pattern is None else part.pattern.bind(*lengths)
        worker = Worker(part.scale, backend, dropout, bound)
        worker.choose_backend(part.query, part.key, part.value)  # raises on all ranks, or on none
        return _Share(group, layout, worker)

    answer = attend_differentiably(
        problem,
        lambda part: share_of(part).attend(part),
        lambda part, answer, grad_output: share_of(part).differentiate(part, answer, grad_output),
    )
    return (answer.output, answer.lse) if return_lse else answer.output


@dataclass(frozen=True)
class _Share:
    """What one rank does."""

    group: Any
    layout: Layout
    worker: Worker

    def attend(self, problem: Problem) -> Partial:
        """Send tokens out, compute this rank's task, and merge what comes back for its shard."""
        query = self._of_queries(problem.query)
        key, value = self._of_keys(problem.key), self._of_keys(problem.value)
        partial = self._compute(query, key, value)
        answer = problem.empty_answer()
        outputs, lses = (send_back(part, self.layout.of_queries, self.group) for part in partial)
        parts: dict[range, list[tuple[Partial, slice]]] = {
            heads: [] for heads in self.layout.query_heads
        }
        for output, lse in zip(outputs, lses, strict=True):
            rows = slice(output.rows.start, output.rows.stop)
            parts[self.layout.query_heads[output.rank]].append(
                (Partial(output.tensor, lse.tensor), rows)
            )
        for heads, found in parts.items():
            of_heads = Partial(*(part[:, heads.start : heads.stop] for part in answer))
            merge_rows(of_heads, found)
        return answer

    def differentiate(self, problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
        """Send tokens out again, and add up the gradients that come back for this shard."""
        query, grad, output, lse = map(self._of_queries, (problem.query, grad_output, *answer))
        key, value = self._of_keys(problem.key), self._of_keys(problem.value)
        if self.layout.task.steps:
            held = self._hold_queries(query), self._hold_keys(key), self._hold_keys(value)
            of_queries = map(self._hold_queries, (grad, output, lse))
            found = self.worker.run_backward(self.layout.task.steps, *held, *of_queries)
        else:
            found = Gradients.zeros(query, key, value)
        gradients = Gradients.zeros(problem.query, problem.key, problem.value)
        sides = self.layout.of_queries, self.layout.of_keys, self.layout.of_keys
        of_sides = self.layout.query_heads, self.layout.kv_heads, self.layout.kv_heads
        for total, part, route, heads in zip(gradients, found, sides, of_sides, strict=True):
            for rank, rows, piece in send_back(part, route, self.group):
                first, last = heads[rank].start, heads[rank].stop
                total[:, first:last, rows.start : rows.stop] += piece
        return gradients

    def _compute(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        if self.layout.task.steps:
            held = self._hold_queries(query), self._hold_keys(key), self._hold_keys(value)
            return self.worker.run_together(self.layout.task.steps, *held)
        shape = query.shape[:3]
        lse = query.new_full(shape, -torch.inf, dtype=lse_dtype(query.dtype))
        return Partial(query.new_zeros((*shape, value.shape[3])), lse)

    def _of_queries(self, shard: Tensor) -> Tensor:
        return send_out(shard, self.layout.query_heads, self.layout.of_queries, self.group)

    def _of_keys(self, shard: Tensor) -> Tensor:
        return send_out(shard, self.layout.kv_heads, self.layout.of_keys, self.group)

    def _hold_queries(self, tokens: Tensor) -> HeldTokens:
        return HeldTokens.packed(tokens, self.layout.of_queries.held)

    def _hold_keys(self, tokens: Tensor) -> HeldTokens:
        return HeldTokens.packed(tokens, self.layout.of_keys.held)


def _check_head_parallel(
    head_parallel: int | str, num_ranks: int, problem: Problem, pattern: Pattern | None
) -> int:
    """Return the number of slices of the heads, or raise TypeError or ValueError."""
    numbers = num_ranks, problem.query.shape[1], problem.key.shape[1]
    differ = pattern is not None and pattern.heads[1] > 1
    if head_parallel == "auto":
        return 1 if differ else choose_head_parallel(*numbers)
    if isinstance(head_parallel, str):
        raise ValueError(f"head_parallel must be an integer or 'auto', got {head_parallel!r}")
    number = as_integer("head_parallel", head_parallel, 1)
    reason = why_not_head_parallel(number, *numbers)
    if differ and number > 1:
        reason = "heads that have patterns of their own are computed one by one"
    if reason is not None:
        raise ValueError(f"head_parallel cannot be {number}: {reason}")
    return number
