"""What tasks contribute to the gradients, into their sum."""

from torch import Tensor

from cqs.gradients import Gradients
from cqs.scheduler import Plan


class GradientSum:
    """Adds up the contributions of a plan's tasks.

    They are added in the order of the tasks; one that arrives before its turn waits. So the bits
    of the sum depend neither on the order of arrival nor on who computed what.
    """

    def __init__(self, plan: Plan, gradients: Gradients):
        """Prepare to add to ``gradients``, one row for each token of the plan."""
        self._plan = plan
        self._gradients = gradients
        self._waiting: dict[int, tuple[list[Tensor], list[tuple[Tensor, Tensor]]]] = {}
        self._next = 0

    def add(self, index: int, queries: list[Tensor], keys: list[tuple[Tensor, Tensor]]) -> None:
        """Take the contribution of one task.

        Args:
            index: The task.
            queries: Gradients of each of the task's ``held_queries``.
            keys: Gradients of keys and values of each of its ``held_keys``.

        Raises:
            ValueError: if the task was added before.
        """
        if index in self._waiting or index < self._next:
            raise ValueError(f"task {index} was added before")
        self._waiting[index] = queries, keys
        while self._next in self._waiting:
            self._add(self._next, *self._waiting.pop(self._next))
            self._next += 1

    def finish(self) -> Gradients:
        """Return the sum.

        Raises:
            RuntimeError: if a task is missing.
        """
        if self._next < self._plan.num_tasks:
            raise RuntimeError(f"no gradients of task {self._next}")
        return self._gradients

    def _add(self, index: int, queries: list[Tensor], keys: list[tuple[Tensor, Tensor]]) -> None:
        task = self._plan.tasks[index]
        for tokens, part in zip(task.held_queries, queries, strict=True):
            self._gradients.query[:, :, tokens.start : tokens.stop] += part
        for tokens, (key, value) in zip(task.held_keys, keys, strict=True):
            self._gradients.key[:, :, tokens.start : tokens.stop] += key
            self._gradients.value[:, :, tokens.start : tokens.stop] += value
