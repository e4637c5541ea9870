"""The measured passes of one problem: computed by tasks, as one task, and by PyTorch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cqs.executors.local import LocalExecutor
from cqs.executors.ray.tasks.job import attend_task, differentiate_task
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.report.exact import verify_answer, verify_gradients
from cqs.report.memory import hold, measure_held
from cqs.report.rows import TaskBytes
from cqs.report.settings import Settings
from cqs.scheduler import Plan, Task
from cqs.tiler import GradientSum, Tiler
from cqs.worker import HeldTokens, Worker
from cqs.worker.memory import predict_pattern_cost

Sides = tuple[list[HeldTokens], list[HeldTokens]]
"""Inputs of a task: the tensors with query rows, and the tensors with key rows."""
Results = Sequence[tuple[Tensor, ...]]
"""Results of a task: for each step or token group, a tuple of tensors."""


class MeasuredPass(ABC):
    """A forward or backward pass that is measured with any number of tasks."""

    name: str
    """One of :data:`cqs.report.rows.PASSES`."""
    of_queries: tuple[Tensor, ...]
    """The tensors with query rows; those with key rows are key and value."""

    def __init__(self, settings: Settings, problem: Problem):
        """Choose the backend.

        Args:
            settings: Settings from which the problem was made.
            problem: The checked problem.
        """
        self.problem = problem
        self._is_causal = settings.is_causal
        self._tensors = problem.query, problem.key, problem.value
        self.of_queries = (problem.query,)
        self.backend = Worker.of(problem).choose_backend(*self._tensors).name
        self._worker = Worker.of(problem, self.backend)

    @abstractmethod
    def compute(self, task: Task, held: Sides) -> Results:
        """Compute a task from its inputs."""

    @abstractmethod
    def _start_merge(self, plan: Plan) -> Any:
        """Return a :class:`Tiler` or :class:`GradientSum` of the tasks of a plan."""

    def predict_bytes(self, task: Task, backend: str) -> int | None:
        """Return the predicted peak memory of a task in bytes; ``None`` without a prediction."""
        return None

    def merger(self, plan: Plan, results: Sequence[Results]) -> Callable[[], Any]:
        """Return a function that merges the results of all tasks; call it once.

        Args:
            plan: The plan of the tasks.
            results: The results of every task, in task order.
        """
        merged = self._start_merge(plan)

        def merge() -> Any:
            for index, groups in enumerate(results):
                merged.add(index, groups)
            return merged.finish()

        return merge

    @abstractmethod
    def verify(self, result: Any) -> None:
        """Raise VerificationError unless sampled rows of the result agree with float64."""

    @abstractmethod
    def dense(self) -> Any:
        """Compute the pass by PyTorch, including pairs that a pattern masks out."""

    def hold(self, task: Task) -> Sides:
        """Copy the inputs of a task, as its worker receives them."""
        return (
            [hold(tensor, task.held_queries) for tensor in self.of_queries],
            [hold(tensor, task.held_keys) for tensor in self._tensors[1:]],
        )

    def one(self) -> Results:
        """Compute the whole problem as one task."""
        sides = self.of_queries, self._tensors[1:]
        of_queries, of_keys = (list(map(HeldTokens.whole, side)) for side in sides)
        return self.compute(self.problem.make_plan(1).task(0), (of_queries, of_keys))

    def weigh(self, task: Task, returned: int) -> TaskBytes:
        """Measure the peak memory of a task.

        Args:
            task: The task.
            returned: Bytes of its results.
        """
        sides = self.hold(task)
        held = [*sides[0], *sides[1]]
        return TaskBytes(
            predicted=self.predict_bytes(task, self.backend),
            peak=measure_held(lambda: self.compute(task, sides), held),
            received=sum(tokens.joined().nbytes for tokens in held),
            returned=returned,
        )

    def _attend_densely(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = F.scaled_dot_product_attention(
            query, key, value, is_causal=self._is_causal, enable_gqa=True
        )
        return output


class Forward(MeasuredPass):
    """The forward pass: output and LSE."""

    name = "forward"

    def compute(self, task: Task, held: Sides) -> list[Partial]:
        """Compute output and LSE of every step."""
        return [Partial(*part) for part in attend_task(self._worker, task, *held)]

    def predict_bytes(self, task: Task, backend: str) -> int:
        """Return the predicted peak memory of a task in bytes."""
        pattern = self.problem.bound_pattern
        return predict_pattern_cost(task, self.problem.shape, backend, pattern).peak_bytes

    def _start_merge(self, plan: Plan) -> Tiler:
        return Tiler(plan, *self.problem.empty_answer())

    def verify(self, result: Partial) -> None:
        """Raise VerificationError unless sampled rows of the answer agree with float64."""
        verify_answer(self.problem, result)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Compute attention over all pairs by PyTorch."""
        return self._attend_densely(*self._tensors)


class Backward(MeasuredPass):
    """The backward pass: gradients of query, key and value."""

    name = "backward"

    def __init__(self, settings: Settings, problem: Problem, grad_output: Tensor):
        """Compute and verify the output and LSE of the forward pass.

        Args:
            settings: Settings from which the problem was made.
            problem: The checked problem.
            grad_output: Gradient of the output, ``[batch, num_heads, seqlen_q, value_dim]``.
        """
        super().__init__(settings, problem)
        self.grad_output = grad_output
        self.answer = LocalExecutor().run(problem, problem.make_plan(1), self.backend)
        verify_answer(problem, self.answer)
        self.of_queries = (problem.query, grad_output, *self.answer)
        self._leaves = [tensor.detach().requires_grad_() for tensor in self._tensors]
        self._dense_output = self._attend_densely(*self._leaves)

    def compute(self, task: Task, held: Sides) -> Results:
        """Compute the gradient contributions of a task."""
        return differentiate_task(self._worker, task, *held) if task.steps else []

    def _start_merge(self, plan: Plan) -> GradientSum:
        return GradientSum(plan, Gradients.zeros(*self._tensors))

    def verify(self, result: Gradients) -> None:
        """Raise VerificationError unless gradients of sampled tokens agree with float64."""
        verify_gradients(self.problem, self.answer, self.grad_output, result)

    def dense(self) -> tuple[Tensor, ...]:
        """Compute the gradients of one PyTorch call over all pairs."""
        output, grad = self._dense_output, self.grad_output
        return torch.autograd.grad(output, self._leaves, grad, retain_graph=True)


def make_pass(settings: Settings, name: str) -> MeasuredPass:
    """Return the measured pass of the settings.

    Args:
        settings: The problem and its options.
        name: ``"forward"`` or ``"backward"``.

    Raises:
        ValueError: The pattern has no live pairs.
    """
    problem, grad_output = settings.make_problem()
    if not problem.make_plan(1).live_pairs:
        raise ValueError(
            f"pattern must have live pairs, got {settings.pattern}, which masks out all pairs of "
            f"{settings.tokens} tokens"
        )
    if name == "forward":
        return Forward(settings, problem)
    return Backward(settings, problem, grad_output)


def bytes_of(groups: Results) -> int:
    """Return the number of bytes of a task's results."""
    return sum(tensor.nbytes for group in groups for tensor in group)
