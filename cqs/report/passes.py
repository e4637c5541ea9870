"""The measured pass of one problem: computed by tasks, as one task, and by PyTorch."""

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cqs.executors.contract import Planned
from cqs.executors.local import LocalExecutor
from cqs.executors.ray.tasks.job import ATTEND, DIFFERENTIATE, Group, TaskResults, count_bytes
from cqs.executors.verify import verify_rows
from cqs.partial import Gradients, Partial
from cqs.report.exact import verify_gradients
from cqs.report.rows import TaskBytes
from cqs.report.settings import Settings
from cqs.scheduler import Plan, Task
from cqs.tiler.group import GroupPart
from cqs.worker import HeldTokens, Worker, choose_backend
from cqs.worker.memory import measure_peak_bytes, predict_pattern_cost

_INPUTS = "query", "key", "value", "grad_output", "output", "lse"
Result = TypeVar("Result")


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
        self._settings = settings
        problem, self.grad_output = settings.make_problem()
        self.problem = problem
        self.is_backward = name == "backward"
        self._pass = DIFFERENTIATE if self.is_backward else ATTEND
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
        self.backend = choose_backend(
            *self._tensors, settings.backend, pattern=problem.pattern
        ).name
        self._worker = Worker.of(problem, self.backend)
        self._inputs: tuple[Tensor, ...] = self._tensors
        if self.is_backward:
            self.answer = LocalExecutor().run(Planned(problem, self.plan_of_one, self.backend))
            verify_rows(problem, self.answer)
            self._inputs = (*self._tensors, self.grad_output, *self.answer)
            self._leaves = [tensor.detach().requires_grad_() for tensor in self._tensors]
            self._dense_output = self._attend_densely(*self._leaves)

    def compute(self, task: Task, held: Sequence[HeldTokens]) -> TaskResults:
        """Compute output and LSE of a task, or its gradients, as an actor of a cluster does."""
        if not task.steps:
            return {}
        groups = [Group(False, tokens) for tokens in task.held_queries]
        groups += [Group(True, tokens) for tokens in task.held_keys] if self.is_backward else []
        return self._pass.compute(self._worker, task, groups, *held)

    def run(self, executor: Any, plan: Plan) -> Any:
        """Compute the whole pass by an executor of :mod:`cqs.executors`."""
        planned = Planned(self.problem, plan, self._settings.backend)
        if self.is_backward:
            return executor.run_backward(planned, self.answer, self.grad_output)
        return executor.run(planned)

    def merge(self, results: Sequence[TaskResults]) -> Partial | Gradients:
        """Merge the results of all tasks, which are in task order."""
        merged: Partial | Gradients
        targets: tuple[Sequence[Tensor], Sequence[Tensor]]
        if self.is_backward:
            merged = Gradients(*map(torch.zeros_like, self._tensors))
            targets = merged[:1], merged[1:]
        else:
            merged = self.problem.empty_answer()
            merged.output.zero_()
            merged.lse.fill_(-torch.inf)
            targets = merged, ()
        parts: dict[Group, list[GroupPart]] = defaultdict(list)
        for group, partials in chain.from_iterable(result.items() for result in results):
            parts[group] += partials
        for group, group_parts in parts.items():
            rows = slice(group.tokens.start, group.tokens.stop)
            own = [target[:, :, rows] for target in targets[group.is_of_keys]]
            self._pass.merge(group_parts, own)
        return merged

    def verify(self, result: Any) -> None:
        """Raise VerificationError unless sampled rows of the result agree with float64."""
        if self.is_backward:
            verify_gradients(self.problem, self.answer, self.grad_output, result)
        else:
            verify_rows(self.problem, result)

    def one(self) -> TaskResults:
        """Compute the whole problem as one task."""
        return self.compute(self.plan_of_one.task(0), list(map(HeldTokens.whole, self._inputs)))

    def dense(self) -> Any:
        """Compute the pass by PyTorch, including pairs that a pattern masks out."""
        if self.is_backward:
            return torch.autograd.grad(
                self._dense_output, self._leaves, self.grad_output, retain_graph=True
            )
        return self._attend_densely(*self._tensors)

    def hold(self, task: Task) -> list[HeldTokens]:
        """Copy the inputs of a task, as its worker receives them."""
        return [
            hold(tensor, task.held_keys if name in ("key", "value") else task.held_queries)
            for name, tensor in zip(_INPUTS, self._inputs, strict=False)
        ]

    def weigh(self, task: Task) -> TaskBytes:
        """Measure the peak memory of a task."""
        held = self.hold(task)
        results, peak = measure_held(lambda: self.compute(task, held), held)
        return TaskBytes(
            predicted=self.predict_bytes(task, self.backend),
            peak=peak,
            received=sum(tokens.joined().nbytes for tokens in held),
            returned=count_bytes(results),
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
    return HeldTokens(torch.cat([tensor[:, :, :0], *parts], dim=2), tuple(ranges))


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
