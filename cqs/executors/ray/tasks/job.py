"""The computation of a run: forward or backward pass of a problem, task by task."""

from collections.abc import Callable

import torch
from torch import Tensor

from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan, Task
from cqs.tiler import GradientSum, Tiler
from cqs.worker import HeldTokens, Worker

TensorGroups = list[tuple[Tensor, ...]]
"""Results of a task: for each step or token group, a tuple of tensors."""


class Attend:
    """The forward pass."""

    def __init__(self, problem: Problem, plan: Plan, into: Partial | None = None):
        """Prepare the result tensors.

        Args:
            problem: The checked problem.
            plan: A plan for the sequence lengths of the problem.
            into: Tensors for output and LSE; ``None`` allocates them. Results are merged on the
                CPU, and :meth:`finish` copies them to tensors on another device.
        """
        self.problem, self.plan = problem, plan
        self._into = self._answer = into or problem.empty_answer()
        if not self._into.output.is_cpu:
            self._answer = Partial(*(torch.empty_like(t, device="cpu") for t in self._into))
        self.is_empty = not self._answer.output.numel()
        self._tiler = Tiler(plan, *self._answer)
        self.of_queries = (problem.query,)
        self.of_keys = problem.key, problem.value
        self.compute: Callable[..., TensorGroups] = attend_task

    def accept(self, task: Task, results: TensorGroups) -> None:
        """Merge the results of a task."""
        self._tiler.add(task.index, [Partial(*tensors) for tensors in results])

    def finish(self) -> Partial:
        """Return output and LSE after all tasks were accepted."""
        if not self.is_empty:
            self._tiler.finish()
        if self._answer is self._into:
            return self._into
        return Partial(*map(Tensor.copy_, self._into, self._answer))


class Differentiate:
    """The backward pass."""

    def __init__(self, problem: Problem, plan: Plan, answer: Partial, grad_output: Tensor):
        """Prepare zero gradients on the CPU.

        Args:
            problem: The checked problem.
            plan: The plan of the forward pass.
            answer: Output and LSE of the forward pass.
            grad_output: Gradient of the output, of the same shape.
        """
        self.problem, self.plan = problem, plan
        tensors = problem.query, problem.key, problem.value
        self.is_empty = not (answer.output.numel() and problem.key.numel())
        self._gradients = Gradients.zeros(*tensors, device="cpu")
        self._sum = GradientSum(plan, self._gradients)
        self.of_queries = problem.query, grad_output, *answer
        self.of_keys = problem.key, problem.value
        self.compute: Callable[..., TensorGroups] = differentiate_task

    def accept(self, task: Task, results: TensorGroups) -> None:
        """Add the gradients that a task has computed."""
        self._sum.add(task.index, results)

    def finish(self) -> Gradients:
        """Return the gradients, on the device of the query, after all tasks were accepted."""
        found = self._gradients if self.is_empty else self._sum.finish()
        return Gradients(*(tensor.to(self.problem.query.device) for tensor in found))


def attend_task(
    worker: Worker, task: Task, of_queries: list[HeldTokens], of_keys: list[HeldTokens]
) -> TensorGroups:
    """Compute the output and LSE of every step of a task."""
    return [tuple(part) for part in worker.run_steps(task.steps, *of_queries, *of_keys)]


def differentiate_task(
    worker: Worker, task: Task, of_queries: list[HeldTokens], of_keys: list[HeldTokens]
) -> TensorGroups:
    """Compute the gradients of a task.

    Args:
        worker: Backend and settings of the computation.
        task: The task.
        of_queries: Queries, gradients of the output, outputs and LSE.
        of_keys: Keys and values.

    Returns:
        ``(grad_query,)`` for each of ``task.held_queries``, then ``(grad_key, grad_value)`` for
        each of ``task.held_keys``.
    """
    query, *rest = of_queries
    found = worker.run_backward(task.steps, query, *of_keys, *rest)
    lengths = list(map(len, task.held_queries)), list(map(len, task.held_keys))
    keys, values = (each.split(lengths[1], dim=2) for each in found[1:])
    return [(part,) for part in found.query.split(lengths[0], dim=2)] + list(
        zip(keys, values, strict=True)
    )
