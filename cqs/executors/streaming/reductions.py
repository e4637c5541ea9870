"""Attention and its gradients over tensors that are streamed through the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cqs.executors.streaming.engine import Side, stream
from cqs.executors.streaming.plan import START, HeldBlock, Position, StreamPlan, Visit
from cqs.executors.streaming.sources import InMemory, Source, Target
from cqs.partial import Partial, RunningMerge, lse_dtype
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker


@dataclass(frozen=True)
class Streamed:
    """An attention problem with tensors off the device, and the worker that computes it."""

    query: Source
    """``[batch, num_heads, seqlen_q, head_dim]``."""
    key: Source
    """``[batch, num_kv_heads, seqlen_kv, head_dim]``."""
    value: Source
    """``[batch, num_kv_heads, seqlen_kv, value_dim]``."""
    worker: Worker
    device: torch.device

    def attend(
        self,
        plan: StreamPlan,
        output: Target,
        lse: Target,
        *,
        start: Position = START,
        visited: Callable[[Visit], None] = lambda visit: None,
        finished: Callable[[HeldBlock], None] = lambda block: None,
    ) -> None:
        """Compute the output and the log-sum-exp.

        Args:
            plan: Plan of the forward pass.
            output: Destination of the output, ``[batch, num_heads, seqlen_q, value_dim]`` in the
                dtype of the query.
            lse: Destination of the log-sum-exp, ``[batch, num_heads, seqlen_q, 1]``, float32
                (float64 for float64 inputs).
            start: The position up to which results are final already.
            visited: Called after each visit has been launched.
            finished: Called after all results of a block have been written.
        """
        stream(
            plan,
            self.device,
            Side((self.query,), has_kv_heads=False),
            Side((self.key, self.value), has_kv_heads=True),
            _Attention(plan, self.worker),
            [output, lse],
            start=start,
            visited=visited,
            finished=finished,
        )

    def differentiate(
        self, plans: Sequence[StreamPlan], answer: Partial, grad_output: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of query, key and value: CPU tensors in the inputs' dtype.

        Args:
            plans: Plans of the passes ``QUERY_GRADIENTS`` and ``KEY_GRADIENTS``.
            answer: Output and LSE of the forward pass, on the CPU.
            grad_output: Gradient of the output, on the CPU, of the output's shape.
        """
        of_queries = Side(
            (
                self.query,
                InMemory(grad_output),
                InMemory(answer.output),
                InMemory(answer.lse.unsqueeze(-1)),
            ),
            has_kv_heads=False,
        )
        of_keys = Side((self.key, self.value), has_kv_heads=True)
        gradients = tuple(
            torch.empty(source.shape, dtype=source.dtype, device="cpu")
            for source in (self.query, self.key, self.value)
        )
        for plan in plans:
            held, streamed = (of_keys, of_queries) if plan.holds_keys else (of_queries, of_keys)
            targets = gradients[1:] if plan.holds_keys else gradients[:1]
            reduction = _Gradients(plan, self.worker)
            stream(plan, self.device, held, streamed, reduction, list(map(InMemory, targets)))
        return gradients


class _Attention:
    """Reduce blocks of queries to their output and LSE."""

    def __init__(self, plan: StreamPlan, worker: Worker):
        self._plan, self._worker = plan, worker
        self._merge: RunningMerge | None = None
        self._answer: Partial | None = None

    def add(self, visit: Visit, held: Sequence[Tensor], streamed: Sequence[Tensor]) -> None:
        """Attend to a chunk of keys and merge the partial output."""
        (query,) = held
        if visit.is_first and visit.is_last:  # nothing to merge: no buffer for sums
            self._answer = self._attend(visit, query, streamed, query.dtype)
            return
        sums = lse_dtype(query.dtype)
        if visit.is_first:
            shape = query.shape[:3]
            output = query.new_empty((*shape, streamed[1].shape[3]), dtype=sums)
            self._merge = RunningMerge(Partial(output, query.new_empty(shape, dtype=sums)))
        assert self._merge is not None
        self._merge.add(self._attend(visit, query, streamed, sums))

    def finish(self, held: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the output and the LSE."""
        answer, self._answer = self._answer, None
        if answer is None:
            assert self._merge is not None
            answer, self._merge = self._merge.finish(), None
        return answer.output.to(held[0].dtype), answer.lse.unsqueeze(-1)

    def _attend(
        self, visit: Visit, query: Tensor, keys: Sequence[Tensor], dtype: torch.dtype
    ) -> Partial:
        if visit.tokens is None:
            shape = query.shape[:3]
            return Partial(
                query.new_zeros((*shape, self._plan.shape.value_columns)),
                query.new_full(shape, -torch.inf, dtype=lse_dtype(query.dtype)),
            )
        worker, steps, held = _prepare(self._plan, self._worker, visit, [query], keys)
        return worker.run_together(steps, *held, dtype=dtype)


class _Gradients:
    """Reduce blocks to the gradients of their queries, or of their keys and values."""

    def __init__(self, plan: StreamPlan, worker: Worker):
        self._plan, self._worker = plan, worker
        self._sums: list[Tensor] = []

    def add(self, visit: Visit, held: Sequence[Tensor], streamed: Sequence[Tensor]) -> None:
        """Add the contribution of a chunk of the other side."""
        mine = held if self._plan.holds_keys else held[:1]
        if visit.is_first:
            sums = lse_dtype(held[0].dtype)
            self._sums = [
                torch.zeros(tensor.shape, dtype=sums, device=tensor.device) for tensor in mine
            ]
        if visit.tokens is None:
            return
        of_queries, of_keys = (streamed, held) if self._plan.holds_keys else (held, streamed)
        worker, steps, tensors = _prepare(
            self._plan,
            self._worker,
            visit,
            [*of_queries[:3], of_queries[3].squeeze(-1)],
            of_keys,
        )
        worker.add_gradients(self._sums, steps, *tensors)

    def finish(self, held: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients in the dtype of the block."""
        sums, self._sums = self._sums, []
        return [each.to(held[0].dtype) for each in sums]


def _prepare(
    plan: StreamPlan,
    worker: Worker,
    visit: Visit,
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
) -> tuple[Worker, tuple[Step, ...], list[HeldTokens]]:
    """Return the worker, steps and tensors of one visit, in the argument order of :class:`Worker`.

    Without pattern and dropout, positions are counted from the first token of the block and of the
    chunk. Visits of equal geometry then share cached tile lists.
    """
    assert visit.tokens is not None
    queries, keys = plan.sides(visit.block.tokens, visit.tokens)
    steps = plan.steps(queries, keys)
    if worker.pattern is None and worker.dropout is None:
        steps = tuple(
            step._replace(
                queries=_moved(step.queries, -queries.start),
                keys=tuple(_moved(each, -keys.start) for each in step.keys),
                causal_keys=step.causal_keys and _moved(step.causal_keys, -keys.start),
            )
            for step in steps
        )
        queries, keys = range(len(queries)), range(len(keys))
    elif worker.dropout is not None:
        dropout = worker.dropout.moved(visit.block.batch, visit.block.heads.start)
        worker = replace(worker, dropout=dropout)
    query, *others = (HeldTokens.packed(tensor, [queries]) for tensor in of_queries)
    return worker, steps, [query, *(HeldTokens.packed(t, [keys]) for t in of_keys), *others]


def _moved(tokens: range, distance: int) -> range:
    return range(tokens.start + distance, tokens.stop + distance)
