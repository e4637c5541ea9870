"""Partial results into the answer, each group of queries as soon as it is complete."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from cqs.partial import Partial, merge_partials
from cqs.scheduler import Plan


class Tiler:
    """Collects the partials of a plan's tasks and writes the exact answer.

    A query group is merged the moment its last partial arrives, and its partials are let go: no
    float32 copy of the whole answer ever exists. Partials merge in the order of their tasks, all
    at once, so the bits of the answer depend neither on the order in which they arrive nor on who
    computed them.
    """

    def __init__(self, plan: Plan, output: Tensor, lse: Tensor):
        """Prepare to fill ``output`` and ``lse``.

        Args:
            plan: The plan whose tasks will be added.
            output: ``[batch, num_heads, plan.seqlen_q, value_dim]``; overwritten. May be a view of
                a memory-mapped file.
            lse: ``[batch, num_heads, plan.seqlen_q]``, float32 (float64 for float64 outputs);
                overwritten.
        """
        self._plan = plan
        self._answer = Partial(output, lse)
        self._added: set[int] = set()
        self._waiting: dict[int, dict[tuple[int, int], tuple[range, Partial]]] = defaultdict(dict)
        self._expected = Counter(step.query_group for task in plan.tasks for step in task.steps)
        for group in set(range(plan.num_workers)) - set(self._expected):
            self._finish_group(group)

    def add(self, worker: int, partials: Sequence[Partial]) -> tuple[range, ...]:
        """Take the partials of one task, one per step, and finish every group they complete.

        Returns:
            The query ranges that became final.

        Raises:
            ValueError: if there is no such task, if it was added before, or if a partial has not
                the shape, dtype or device of its rows of the answer. Nothing is taken then.
        """
        steps = self._plan.task(worker).steps
        if worker in self._added:
            raise ValueError(f"task {worker} was added before")
        if len(partials) != len(steps):
            raise ValueError(f"task {worker} has {len(steps)} steps, got {len(partials)} partials")
        for i, (step, partial) in enumerate(zip(steps, partials, strict=True)):
            for name, got, expected in zip(
                Partial._fields, partial, self._rows(step.queries), strict=True
            ):
                if (got.shape, got.dtype, got.device) != (
                    expected.shape,
                    expected.dtype,
                    expected.device,
                ):
                    raise ValueError(
                        f"task {worker}, step {i}: {name} must be {tuple(expected.shape)} "
                        f"{expected.dtype} on {expected.device}, "
                        f"got {tuple(got.shape)} {got.dtype} on {got.device}"
                    )
        self._added.add(worker)
        for i, (step, partial) in enumerate(zip(steps, partials, strict=True)):
            self._waiting[step.query_group][worker, i] = step.queries, partial
        complete = [
            group
            for group in dict.fromkeys(step.query_group for step in steps)
            if len(self._waiting[group]) == self._expected[group]
        ]
        return tuple(self._finish_group(group) for group in complete)

    @property
    def missing(self) -> tuple[int, ...]:
        """The tasks that have not been added, ascending."""
        return tuple(w for w in range(self._plan.num_workers) if w not in self._added)

    def finish(self) -> Partial:
        """Return the answer.

        Raises:
            RuntimeError: if a task is missing; the message names all that are.
        """
        if self.missing:
            raise RuntimeError(f"no partial results of tasks {list(self.missing)}")
        return self._answer

    def _rows(self, queries: range) -> Partial:
        return _slice_rows(self._answer, queries.start, queries.stop)

    def _finish_group(self, group: int) -> range:
        """Merge what arrived for a group; rows that no step computes see no key."""
        rows = self._plan.token_groups[group]
        waiting = self._waiting.pop(group, {})
        arrived = [waiting[task_and_step] for task_and_step in sorted(waiting)]
        cuts = {rows.start, rows.stop}.union(*((r.start, r.stop) for r, _ in arrived))
        ordered = sorted(cuts)
        for start, stop in zip(ordered, ordered[1:], strict=False):
            answer = _slice_rows(self._answer, start, stop)
            partials = [
                _slice_rows(partial, start - queries.start, stop - queries.start)
                for queries, partial in arrived
                if queries.start <= start and stop <= queries.stop
            ]
            if partials:
                answer.lse.copy_(merge_partials(partials, out=answer.output).lse)
            else:
                answer.output.zero_()
                answer.lse.fill_(-torch.inf)
        return rows


def _slice_rows(partial: Partial, start: int, stop: int) -> Partial:
    return Partial(*(tensor[:, :, start:stop] for tensor in partial))
