"""The computation of a run: forward or backward pass of a problem, task by task."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan, Task
from cqs.tiler.group import Part, merge_group, sum_group
from cqs.worker import HeldTokens, Worker


class Group(NamedTuple):
    """Tokens of one token group whose results are merged together."""

    is_of_keys: bool
    """Whether the results are those of keys, or of queries."""
    tokens: range
    """The tokens."""


@dataclass(frozen=True)
class Pass:
    """What actors compute in a forward or a backward pass."""

    compute: Callable[..., dict[Group, list[Part]]]
    """Computes the parts of a task: ``attend_task`` or ``differentiate_task``."""
    merge: Callable[[Sequence[Part], Sequence[Tensor]], None]
    """Merges all parts of a group: :func:`merge_group` or :func:`sum_group`."""


class Job:
    """A pass of a problem: what each task reads, and where the merged groups belong."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        of_pass: Pass,
        of_queries: tuple[Tensor, ...],
        of_keys: tuple[Tensor, ...],
        results: dict[bool, tuple[Tensor, ...]],
    ):
        """Find the tasks of each group.

        Args:
            problem: The checked problem.
            plan: A plan for the sequence lengths of the problem.
            of_pass: What the actors compute.
            of_queries: Tensors whose rows of the held queries a task reads.
            of_keys: Tensors whose rows of the held keys a task reads.
            results: Tensors of the result: of queries, and in a backward pass of keys. Rows of
                groups with a task are written to.
        """
        self.problem, self.plan, self.of_pass = problem, plan, of_pass
        self.of_queries, self.of_keys, self.results = of_queries, of_keys, results
        self.tasks_of: dict[Group, list[int]] = defaultdict(list)
        """Tasks whose results each group needs, in the order of their merge."""
        for task in plan.tasks if problem.query.numel() and problem.value.numel() else ():
            for group in self.groups(task):
                self.tasks_of[group].append(task.index)

    @classmethod
    def forward(cls, problem: Problem, plan: Plan, answer: Partial) -> "Job":
        """Return the forward pass; the result is written to ``answer``."""
        of_keys = problem.key, problem.value
        job = cls(problem, plan, ATTEND, (problem.query,), of_keys, {False: tuple(answer)})
        if sum(len(group.tokens) for group in job.tasks_of) < problem.query.shape[2]:
            answer.output.zero_()
            answer.lse.fill_(-torch.inf)
        return job

    @classmethod
    def backward(
        cls,
        problem: Problem,
        plan: Plan,
        answer: Partial,
        grad_output: Tensor,
        gradients: Gradients,
    ) -> "Job":
        """Return the backward pass.

        Args:
            problem: The checked problem.
            plan: The plan of the forward pass.
            answer: Output and LSE of the forward pass.
            grad_output: Gradient of the output, of the same shape.
            gradients: Zeros, to which the gradients are written.
        """
        query, *of_keys = gradients
        results = {False: (query,), True: tuple(of_keys)}
        of_queries = problem.query, grad_output, *answer
        return cls(problem, plan, DIFFERENTIATE, of_queries, (problem.key, problem.value), results)

    def groups(self, task: Task) -> list[Group]:
        """Return the groups to which a task contributes."""
        if not task.steps:
            return []
        of_keys = task.held_keys if True in self.results else ()
        return [
            Group(side, tokens)
            for side, ranges in ((False, task.held_queries), (True, of_keys))
            for tokens in ranges
        ]

    def accept(self, group: Group, merged: Sequence[Tensor]) -> None:
        """Write the merged result of a group."""
        rows = slice(group.tokens.start, group.tokens.stop)
        for result, tensor in zip(self.results[group.is_of_keys], merged, strict=True):
            result[:, :, rows].copy_(tensor)


def attend_task(
    worker: Worker, task: Task, of_queries: list[HeldTokens], of_keys: list[HeldTokens]
) -> dict[Group, list[Part]]:
    """Compute the output and LSE of every step of a task, by query group."""
    found: dict[Group, list[Part]] = {Group(False, tokens): [] for tokens in task.held_queries}
    partials = worker.run_steps(task.steps, *of_queries, *of_keys)
    for step, partial in zip(task.steps, partials, strict=True):
        for group, parts in found.items():
            start = group.tokens.start
            if step.queries.start in group.tokens:
                rows = slice(step.queries.start - start, step.queries.stop - start)
                parts.append((rows, tuple(partial)))
    return found


def differentiate_task(
    worker: Worker, task: Task, of_queries: list[HeldTokens], of_keys: list[HeldTokens]
) -> dict[Group, list[Part]]:
    """Compute the gradients of a task, by group.

    Args:
        worker: Backend and settings of the computation.
        task: The task.
        of_queries: Queries, gradients of the output, outputs and LSE.
        of_keys: Keys and values.
    """
    query, *rest = of_queries
    found = worker.run_backward(task.steps, query, *of_keys, *rest)
    parts: dict[Group, list[Part]] = {}
    for side, ranges, tensors in (
        (False, task.held_queries, found[:1]),
        (True, task.held_keys, found[1:]),
    ):
        split = (tensor.split(list(map(len, ranges)), dim=2) for tensor in tensors)
        for tokens, of_tokens in zip(ranges, zip(*split, strict=True), strict=True):
            parts[Group(side, tokens)] = [(slice(None), of_tokens)]
    return parts


ATTEND = Pass(attend_task, merge_group)
DIFFERENTIATE = Pass(differentiate_task, sum_group)
