"""Merge partial outputs by query group as soon as a group is complete."""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from cqs.partial import Partial, check_partial, merge_rows
from cqs.scheduler import Plan


class Tiler:
    """Merges the partial outputs of a plan's tasks into the exact result.

    The partial outputs of a query group are kept until the last arrives, and then merged in task
    order. The result is therefore bitwise identical for every order of arrival and assignment to
    workers.
    """

    def __init__(self, plan: Plan, output: Tensor, lse: Tensor):
        """Start with no partial outputs; rows without a task get output 0 and LSE -inf.

        Args:
            plan: The plan whose tasks will be added.
            output: The result, ``[batch, num_heads, plan.seqlen_q, value_dim]``; overwritten. It
                may be a view of a memory-mapped file.
            lse: The result's LSE, ``[batch, num_heads, plan.seqlen_q]``, float32 (float64 for
                float64 outputs); overwritten.
        """
        self._plan = plan
        self._answer = Partial(output, lse)
        self._added: set[int] = set()
        self._waiting: dict[tuple[int, int], Partial] = {}
        self._turns: dict[int, dict[tuple[int, int], slice]] = defaultdict(dict)
        """Query group -> (task, step) -> rows within the group, in the order of merges."""
        for task in plan.tasks:
            for i, step in enumerate(task.steps):
                start = plan.token_groups[step.query_group].start
                rows = slice(step.queries.start - start, step.queries.stop - start)
                self._turns[step.query_group][task.index, i] = rows
        for group, queries in enumerate(plan.token_groups):
            if group not in self._turns:
                merge_rows(self._rows(queries), [])

    def add(self, index: int, partials: Sequence[Partial]) -> tuple[range, ...]:
        """Add the partial outputs of one task and complete query groups where possible.

        Args:
            index: Index of the task, in ``range(plan.num_tasks)``.
            partials: One partial output per step of the task, with the shape, dtype and device of
                the step's rows of ``output`` and ``lse``.

        Returns:
            The query ranges that are now final.

        Raises:
            ValueError: ``index`` is out of range, the task was added before, the number of partial
                outputs is wrong, or one has the wrong shape, dtype or device. Nothing is added
                then.
        """
        if not 0 <= index < self._plan.num_tasks:
            raise ValueError(f"index must be in range({self._plan.num_tasks}), got {index}")
        steps = self._plan.tasks[index].steps
        if index in self._added:
            raise ValueError(f"task {index} was added before")
        if len(partials) != len(steps):
            raise ValueError(f"task {index} has {len(steps)} steps, got {len(partials)} partials")
        for i, (step, partial) in enumerate(zip(steps, partials, strict=True)):
            check_partial(partial, self._answer, len(step.queries), f"task {index}, step {i}")
        self._added.add(index)
        for i, partial in enumerate(partials):
            self._waiting[index, i] = partial
        final = []
        for group in dict.fromkeys([step.query_group for step in steps]):
            turns, queries = self._turns[group], self._plan.token_groups[group]
            if self._waiting.keys() >= turns.keys():
                parts = [(self._waiting.pop(turn), rows) for turn, rows in turns.items()]
                merge_rows(self._rows(queries), parts)
                final.append(queries)
        return tuple(final)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the indices of the tasks that have not been added, ascending."""
        return tuple(w for w in range(self._plan.num_tasks) if w not in self._added)

    def finish(self) -> Partial:
        """Return the result: the output and its LSE.

        Raises:
            RuntimeError: A task is missing; the message gives all missing tasks.
        """
        if self.missing:
            raise RuntimeError(f"no partial results of tasks {list(self.missing)}")
        return self._answer

    def _rows(self, queries: range) -> Partial:
        output, lse = self._answer
        rows = slice(queries.start, queries.stop)
        return Partial(output[:, :, rows], lse[:, :, rows])
