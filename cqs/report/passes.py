"""The forward and the backward pass of one problem: by tasks, by one worker and by PyTorch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cqs.executors.local import run_local
from cqs.executors.ray.job import TensorGroups, attend_task, differentiate_task
from cqs.gradients import Gradients
from cqs.partial import Partial
from cqs.problem import Problem
from cqs.report.exact import verify_answer, verify_gradients
from cqs.report.memory import hold, measure_held
from cqs.report.rows import Held
from cqs.report.settings import Settings
from cqs.scheduler import Plan, Task, predict_cost
from cqs.tiler import GradientSum, Tiler
from cqs.worker import HeldTokens, Worker

Sides = tuple[list[HeldTokens], list[HeldTokens]]
"""What a task was given: tensors whose rows are queries, and those whose rows are keys."""


class Pass(ABC):
    """One pass, whatever the number of workers by the same kernels."""

    name: str
    """One of :data:`cqs.report.rows.PASSES`."""

    def __init__(self, settings: Settings, problem: Problem):
        """Take a problem, and the settings that it was made with."""
        self.problem = problem
        self._is_causal = settings.is_causal
        self._tensors = problem.query, problem.key, problem.value
        self.backend = Worker.of(problem).choose_backend(*self._tensors)
        self._worker = Worker.of(problem, self.backend)

    @property
    @abstractmethod
    def _sides(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The whole tensors of which tasks are given rows."""

    @abstractmethod
    def compute(self, task: Task, held: Sides) -> TensorGroups:
        """Compute a task."""

    @abstractmethod
    def predict_bytes(self, task: Task, backend: str) -> int | None:
        """Predict what a task holds at its peak, if the plan can."""

    @abstractmethod
    def merger(self, plan: Plan, results: Sequence[TensorGroups]) -> Callable[[], Any]:
        """Prepare to merge, once, what the tasks of a plan return."""

    @abstractmethod
    def verify(self, result: Any) -> None:
        """Raise VerificationError unless sampled rows of the result agree with float64."""

    @abstractmethod
    def dense(self) -> Any:
        """Compute the pass of all pairs, masked out or not, by a call of PyTorch."""

    def hold(self, task: Task) -> Sides:
        """Copy what a task needs, as its worker receives it."""
        of_queries, of_keys = self._sides
        return (
            [hold(tensor, task.held_queries) for tensor in of_queries],
            [hold(tensor, task.held_keys) for tensor in of_keys],
        )

    def one(self) -> TensorGroups:
        """Compute everything as one task."""
        of_queries, of_keys = self._sides
        sides = list(map(HeldTokens.whole, of_queries)), list(map(HeldTokens.whole, of_keys))
        return self.compute(self.problem.make_plan(1).task(0), sides)

    def weigh(self, task: Task, returned: int) -> Held:
        """Measure what a task holds at its peak; it is known how many bytes it returns."""
        sides = self.hold(task)
        held = [*sides[0], *sides[1]]
        return Held(
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


class Forward(Pass):
    """The answer."""

    name = "forward"

    @property
    def _sides(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return self._tensors[:1], self._tensors[1:]

    def compute(self, task: Task, held: Sides) -> TensorGroups:
        """Compute output and lse of every step."""
        return attend_task(self._worker, task, *held)

    def predict_bytes(self, task: Task, backend: str) -> int:
        """Predict what a task holds at its peak."""
        pattern = self.problem.bound_pattern
        return predict_cost(task, self.problem.shape, backend, pattern).peak_bytes

    def merger(self, plan: Plan, results: Sequence[TensorGroups]) -> Callable[[], Partial]:
        """Prepare to merge partial results."""
        tiler = Tiler(plan, *self.problem.empty_answer())

        def merge() -> Partial:
            for index, parts in enumerate(results):
                tiler.add(index, [Partial(*part) for part in parts])
            return tiler.finish()

        return merge

    def verify(self, result: Partial) -> None:
        """Raise VerificationError unless sampled rows of the answer agree with float64."""
        verify_answer(self.problem, result)

    @torch.no_grad()
    def dense(self) -> Tensor:
        """Attend to all pairs."""
        return self._attend_densely(*self._tensors)


class Backward(Pass):
    """The gradients."""

    name = "backward"

    def __init__(self, settings: Settings, problem: Problem, grad_output: Tensor):
        """Compute and check the answer that gradients are taken of.

        Args:
            settings: As for the forward pass.
            problem: Likewise.
            grad_output: Gradient of the output.
        """
        super().__init__(settings, problem)
        self.grad_output = grad_output
        self.answer = run_local(problem, problem.make_plan(1), backend=self.backend)
        verify_answer(problem, self.answer)
        self._leaves = [tensor.detach().requires_grad_() for tensor in self._tensors]
        self._dense_output = self._attend_densely(*self._leaves)

    @property
    def _sides(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return (self.problem.query, self.grad_output, *self.answer), self._tensors[1:]

    def compute(self, task: Task, held: Sides) -> TensorGroups:
        """Compute what a task contributes to the gradients."""
        return differentiate_task(self._worker, task, *held) if task.steps else []

    def predict_bytes(self, task: Task, backend: str) -> None:
        """Return None: plans predict forward passes."""

    def merger(self, plan: Plan, results: Sequence[TensorGroups]) -> Callable[[], Gradients]:
        """Prepare to add up contributions."""
        total = GradientSum(plan, Gradients.zeros(*self._tensors))

        def merge() -> Gradients:
            for task, parts in zip(plan.tasks, results, strict=True):
                number = len(task.held_queries)
                queries = [query for (query,) in parts[:number]]
                total.add(task.index, queries, [(key, value) for key, value in parts[number:]])
            return total.finish()

        return merge

    def verify(self, result: Gradients) -> None:
        """Raise VerificationError unless gradients of sampled tokens agree with float64."""
        verify_gradients(self.problem, self.answer, self.grad_output, result)

    def dense(self) -> tuple[Tensor, ...]:
        """Differentiate one call of PyTorch."""
        output, grad = self._dense_output, self.grad_output
        return torch.autograd.grad(output, self._leaves, grad, retain_graph=True)


def make_pass(settings: Settings, name: str) -> Pass:
    """Return ``"forward"`` or ``"backward"`` of what the settings describe.

    Raises:
        ValueError: if nothing attends to anything.
    """
    problem, grad_output = settings.make_problem()
    if not problem.make_plan(1).live_pairs:
        raise ValueError(f"no query sees a key, of {settings.tokens} tokens: {settings.pattern}")
    if name == "forward":
        return Forward(settings, problem)
    return Backward(settings, problem, grad_output)


def bytes_of(groups: TensorGroups) -> int:
    """Return the bytes that a task returns."""
    return sum(tensor.nbytes for group in groups for tensor in group)
