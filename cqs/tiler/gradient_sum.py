"""Sum the gradient contributions of tasks."""

from collections.abc import Sequence

from torch import Tensor

from cqs.partial import Gradients
from cqs.scheduler import Plan


class GradientSum:
    """Sums the gradient contributions of a plan's tasks.

    Contributions are added in task order; one that arrives early is kept until its turn. The sum is
    therefore bitwise identical for every order of arrival and every assignment to workers.
    """

    def __init__(self, plan: Plan, gradients: Gradients):
        """Start with the values in ``gradients``, to which contributions are added in place.

        Args:
            plan: The plan whose tasks will be added.
            gradients: Gradients of query, key and value, ``[batch, heads, seqlen, head_dim]``, with
                the lengths of the plan.
        """
        self._plan = plan
        self._gradients = gradients
        self._waiting: dict[int, Sequence[tuple[Tensor, ...]]] = {}
        self._next = 0

    def add(self, index: int, groups: Sequence[tuple[Tensor, ...]]) -> None:
        """Add the contribution of one task, or keep it until all tasks before it are added.

        Args:
            index: Index of the task.
            groups: The query gradient ``[batch, num_heads, rows, head_dim]`` of each range of the
                task's ``held_queries``, then the gradients of key and value ``[batch, num_kv_heads,
                rows, dim]`` of each range of its ``held_keys``.

        Raises:
            ValueError: The task was added before.
        """
        if index in self._waiting or index < self._next:
            raise ValueError(f"task {index} was added before")
        self._waiting[index] = groups
        while self._next in self._waiting:
            self._add(self._next, self._waiting.pop(self._next))
            self._next += 1

    def finish(self) -> Gradients:
        """Return the gradients, summed over all tasks.

        Raises:
            RuntimeError: A task is missing; the message gives the first.
        """
        if self._next < self._plan.num_tasks:
            raise RuntimeError(f"no gradients of task {self._next}")
        return self._gradients

    def _add(self, index: int, groups: Sequence[tuple[Tensor, ...]]) -> None:
        task, (query, *of_keys) = self._plan.tasks[index], self._gradients
        sides = [([query], tokens) for tokens in task.held_queries]
        sides += [(of_keys, tokens) for tokens in task.held_keys]
        for (sums, tokens), parts in zip(sides, groups, strict=True):
            for total, part in zip(sums, parts, strict=True):
                total[:, :, tokens.start : tokens.stop] += part
