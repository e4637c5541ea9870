"""The measured pass of one problem: computed by tasks, as one task, and by PyTorch."""

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cqs.executors.contract import Planned
from cqs.executors.local import LocalExecutor
from cqs.executors.ray.tasks.job import Group, differentiate_task
from cqs.executors.verify import verify_rows
from cqs.partial import Gradients
from cqs.report.exact import verify_gradients
from cqs.report.rows import TaskBytes
from cqs.report.settings import Settings
from cqs.scheduler import Plan, Task
from cqs.tiler import GradientSum, Tiler
from cqs.worker import HeldTokens, Worker
from cqs.worker.memory import measure_peak_bytes, predict_pattern_cost

Result = TypeVar("Result")
Sides = tuple[list[HeldTokens], list[HeldTokens]]
"""Inputs of a task: the tensors with query rows, and the tensors with key rows."""
Results = Sequence[tuple[Tensor, ...]]
"""Results of a task: for each step or token group, a tuple of tensors."""


class MeasuredPass:
    """A forward or backward pass that is measured with any number of tasks."""

    def __init__(self, settings: Settings, name: str):
        """Make the problem and choose the backend; before a backward pass, verify the forward pass.

        Args:
            settings: The problem and its options.
            name: One of :data:`cqs.report.rows.PASSES`.

        Raises:
            ValueError: The pattern has no live pairs.
        """
        problem, self.grad_output = settings.make_problem()
        self.problem = problem
        self.is_backward = name == "backward"
        self.plan_of_one = problem.make_plan(1)
        if not self.plan_of_one.live_pairs:
            raise ValueError(
                f"pattern must have live pairs, got {settings.pattern}, which masks out all pairs "
                f"of {settings.tokens} tokens"
            )
        self._attend_densely = lambda query, key, value: F.scaled_dot_product_attention(
            query, key, value, is_causal=settings.is_causal, enable_gqa=True
        )
        self._tensors = problem.query, problem.key, problem.value
        self.backend = Worker.of(problem).choose_backend(*self._tensors).name
        self._worker = Worker.of(problem, self.backend)
        self._of_queries: tuple[Tensor, ...] = (problem.query,)
        if self.is_backward:
            self.answer = LocalExecutor().run(Planned(problem, self.plan_of_one, self.backend))
            verify_rows(problem, self.answer)
            self._of_queries = (problem.query, self.grad_output, *self.answer)
            self._leaves = [tensor.detach().requires_grad_() for tensor in self._tensors]
            self._dense_output = self._attend_densely(*self._leaves)

    def compute(self, task: Task, held: Sides) -> Results:
        """Compute output and LSE of every step of a task, or the task's gradients."""
        if not task.steps:
            return []
        if self.is_backward:
            groups = [Group(False, tokens) for tokens in task.held_queries]
            groups += [Group(True, tokens) for tokens in task.held_keys]
            parts = differentiate_task(self._worker, task, groups, *held).values()
            return [tensors for group in parts for _, tensors in group]
        return self._worker.run_steps(task.steps, *held[0], *held[1])

    def run(self, executor: Any, plan: Plan) -> Any:
        """Compute the whole pass by an executor of :mod:`cqs.executors`."""
        if self.is_backward:
            return executor.run_backward(Planned(self.problem, plan), self.answer, self.grad_output)
        return executor.run(Planned(self.problem, plan))

    def merger(self, plan: Plan, results: Sequence[Results]) -> Callable[[], Any]:
        """Return a function that merges the results of all tasks; call it once.

        Args:
            plan: The plan of the tasks.
            results: The results of every task, in task order.
        """
        merged: Any
        if self.is_backward:
            merged = GradientSum(plan, Gradients.zeros(*self._tensors))
        else:
            merged = Tiler(plan, *self.problem.empty_answer())

        def merge() -> Any:
            for index, groups in enumerate(results):
                merged.add(index, groups)
            return merged.finish()

        return merge

    def verify(self, result: Any) -> None:
        """Raise VerificationError unless sampled rows of the result agree with float64."""
        if self.is_backward:
            verify_gradients(self.problem, self.answer, self.grad_output, result)
        else:
            verify_rows(self.problem, result)

    def one(self) -> Results:
        """Compute the whole problem as one task."""
        sides = self._of_queries, self._tensors[1:]
        of_queries, of_keys = (list(map(HeldTokens.whole, side)) for side in sides)
        return self.compute(self.plan_of_one.task(0), (of_queries, of_keys))

    def dense(self) -> Any:
        """Compute the pass by PyTorch, including pairs that a pattern masks out."""
        if self.is_backward:
            return torch.autograd.grad(
                self._dense_output, self._leaves, self.grad_output, retain_graph=True
            )
        return self._attend_densely(*self._tensors)

    def hold(self, task: Task) -> Sides:
        """Copy the inputs of a task, as its worker receives them."""
        return (
            [hold(tensor, task.held_queries) for tensor in self._of_queries],
            [hold(tensor, task.held_keys) for tensor in self._tensors[1:]],
        )

    def weigh(self, task: Task) -> TaskBytes:
        """Measure the peak memory of a task."""
        sides = self.hold(task)
        held = [*sides[0], *sides[1]]
        results, peak = measure_held(lambda: self.compute(task, sides), held)
        return TaskBytes(
            predicted=self.predict_bytes(task, self.backend),
            peak=peak,
            received=sum(tokens.joined().nbytes for tokens in held),
            returned=sum(tensor.nbytes for group in results for tensor in group),
        )

    def predict_bytes(self, task: Task, backend: str) -> int | None:
        """Return the predicted peak memory of a task in bytes; ``None`` for backward passes."""
        if self.is_backward:
            return None
        pattern = self.problem.bound_pattern
        return predict_pattern_cost(task, self.problem.shape, backend, pattern).peak_bytes


def hold(tensor: Tensor, ranges: Sequence[range]) -> HeldTokens:
    """Copy tokens of ``[batch, heads, seqlen, dim]``, as a worker receives them."""
    parts = [tensor[:, :, r.start : r.stop] for r in ranges]
    return HeldTokens.packed(torch.cat([tensor[:, :, :0], *parts], dim=2), ranges)


def measure_held(compute: Callable[[], Result], held: Sequence[HeldTokens]) -> tuple[Result, int]:
    """Return the result of a computation, and its peak memory in bytes including its inputs.

    Args:
        compute: The computation. It runs twice: the first run compiles, and allocates what stays.
        held: The inputs.
    """
    device = held[0].joined().device
    compute()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a cached block may be up to a megabyte larger than requested
    gc.disable()  # no other object may be freed during the measurement
    try:
        result, peak = measure_peak_bytes(compute, device)
    finally:
        gc.enable()
    return result, peak + sum(tokens.joined().nbytes for tokens in held)
