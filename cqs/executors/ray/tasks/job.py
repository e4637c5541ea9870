"""The computation of a run: forward or backward pass of a problem, task by task."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cqs.executors.ray.blob import Blob
from cqs.executors.ray.tasks.shared_memory import SharedTensor
from cqs.partial import Gradients, Partial, lse_dtype
from cqs.problem import Problem
from cqs.problem.bias_blocks import Piece, hold, pack, pieces_of, places, unpack
from cqs.problem.score_terms import ScoreTerms
from cqs.ranges import overlap
from cqs.scheduler import Plan, Task
from cqs.tiler.group import GroupPart, merge_group, sum_group
from cqs.worker import HeldTokens, Worker

GROUP_BYTES = 64 * 2**20
"""Largest result of a group in bytes: while the driver reads one, an actor merges the next."""


class Group(NamedTuple):
    """Tokens whose results are merged together: a token group of the plan, or a part of it."""

    is_of_keys: bool
    """Whether the results are those of keys, or of queries."""
    tokens: range
    """The tokens."""


TaskResults = dict[Group, list[GroupPart]]
"""Results of a task: parts of the merged result of each group."""


@dataclass(frozen=True)
class TaskPass:
    """The computation of actors in a forward or a backward pass."""

    compute: Callable[..., TaskResults]
    """Computes the parts of a task: ``attend_task`` or ``differentiate_task``."""
    merge: Callable[[Sequence[GroupPart], Sequence[Tensor]], None]
    """Merges all parts of a group: :func:`merge_group` or :func:`sum_group`."""


class ResultTensor(NamedTuple):
    """A tensor of the result of a run."""

    shape: tuple[int, ...]
    """``[batch, heads, seqlen, ...]``."""
    dtype: torch.dtype
    """Dtype of the tensor."""
    shared: SharedTensor | None = None
    """The tensor itself, if the actors write to it."""


@dataclass(frozen=True)
class RunSettings:
    """Settings that all calls of a run share."""

    number: int
    """Number of the run."""
    task_pass: TaskPass
    """Forward or backward pass."""
    worker: Worker
    """Backend and settings of the computation."""
    results: dict[bool, tuple[ResultTensor, ...]]
    """Tensors of the result: of queries (False), and in a backward pass of keys (True)."""
    keeps_inputs: bool
    """Whether a GPU keeps tokens for later tasks, as far as its memory permits."""
    shares_parts: bool
    """Whether all actors can read results of tasks in the memory of each other."""


class TaskCall(NamedTuple):
    """A task, and the groups for which its results are needed."""

    task: Task
    """The task."""
    groups: list[Group]
    """The groups."""
    bias: "Bias | None" = None
    """The blocks of the bias that the task reads, if there is one."""


class Bias(NamedTuple):
    """Blocks of a bias."""

    shape: tuple[int, ...]
    """Shape of the whole bias."""
    pieces: list[Piece]
    """The blocks."""
    packed: Blob
    """Their values, one block after another."""


class MergeCall(NamedTuple):
    """The merge of a group."""

    group: Group
    """The group."""
    parts: list[Any]
    """The parts of all its tasks, in the order of their merge: for each task the rows and locations
    of tensors, or a Ray reference to rows and blobs."""
    is_repeated: bool
    """Whether another actor has begun to merge them, and may still write to the result."""


class Job:
    """A pass of a problem: the tensors that tasks read, and the tensors of the result."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        task_pass: TaskPass,
        query_tensors: tuple[Tensor, ...],
        key_tensors: tuple[Tensor, ...],
        results: dict[bool, tuple[Tensor, ...]],
    ):
        """Find the tasks of each group.

        Args:
            problem: The checked problem.
            plan: A plan for the sequence lengths of the problem.
            task_pass: The computation of the actors.
            query_tensors: Tensors whose rows of the held queries a task reads.
            key_tensors: Tensors whose rows of the held keys a task reads.
            results: Tensors of the result: of queries, and in a backward pass of keys. Rows of
                groups with a task are written to.
        """
        self.problem, self.plan, self.task_pass = problem, plan, task_pass
        self.inputs = query_tensors, key_tensors
        """Tensors that the tasks read: of queries, and of keys."""
        self.results = results
        has_result = problem.query.numel() and problem.value.numel()
        self.groups_of = {
            task.index: self._groups(task) for task in plan.tasks if has_result and task.steps
        }
        """Groups to which each task contributes."""
        self.tasks_of: dict[Group, list[int]] = defaultdict(list)
        """Tasks whose results each group needs, in the order of their merge."""
        for index, groups in self.groups_of.items():
            for group in groups:
                self.tasks_of[group].append(index)

    @classmethod
    def forward(cls, problem: Problem, plan: Plan, answer: Partial) -> "Job":
        """Return the forward pass; the result is written to ``answer``."""
        key_tensors = problem.key, problem.value
        job = cls(problem, plan, ATTEND, (problem.query,), key_tensors, {False: tuple(answer)})
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
        query, *key_gradients = gradients
        results = {False: (query,), True: tuple(key_gradients)}
        query_rows = problem.query, grad_output, *answer
        return cls(problem, plan, DIFFERENTIATE, query_rows, (problem.key, problem.value), results)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the run reads or writes."""
        return [tensor for side in (*self.inputs, *self.results.values()) for tensor in side]

    def synchronize(self) -> None:
        """Wait for work on these tensors that this thread has launched on GPUs."""
        for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _groups(self, task: Task) -> list[Group]:
        return [
            Group(side, tokens)
            for side, tensors in self.results.items()
            for held in (task.held_keys if side else task.held_queries)
            for tokens in _divide_tokens(held, sum(tensor[:, :, :1].nbytes for tensor in tensors))
        ]

    def num_bytes(self, group: Group) -> int:
        """Return the bytes of the merged result of a group."""
        tensors = self.results[group.is_of_keys]
        return len(group.tokens) * sum(tensor[:, :, :1].nbytes for tensor in tensors)

    def touch_results(self) -> None:
        """Write zeros to the results of all groups: later writes to the same memory are faster."""
        for group in self.tasks_of:
            rows = slice(group.tokens.start, group.tokens.stop)
            for result in self.results[group.is_of_keys]:
                result[:, :, rows].zero_()

    def bias_of(self, task: Task) -> Bias | None:
        """Return the blocks of the bias that a task reads."""
        terms = self.problem.terms
        if terms is None or terms.bias is None:
            return None
        pieces = _pieces_of(task, terms.bias)
        packed = pack(terms, terms.bias, pieces)
        return Bias(tuple(terms.bias.shape), pieces, Blob(packed))

    def add_sums(self, task: Task, sums: Sequence[Tensor]) -> None:
        """Add the gradients of the leaves of the score terms that a task has computed."""
        terms = self.problem.terms
        if terms is None or not sums:
            return
        own = list(terms.sums)
        if terms.bias is not None and terms.bias_requires_grad:
            total, (packed, *sums) = own.pop(0), sums
            pieces = _pieces_of(task, total)
            unpack(packed.to(total.device), places(terms, total, pieces))
        for total, part in zip(own, sums, strict=True):
            total.add_(part.to(total.device))

    def accept(self, group: Group, merged: Sequence[Tensor]) -> None:
        """Write the merged result of a group."""
        rows = slice(group.tokens.start, group.tokens.stop)
        for result, tensor in zip(self.results[group.is_of_keys], merged, strict=True):
            result[:, :, rows].copy_(tensor)


def terms_of_task(settings: RunSettings, call: TaskCall, device: torch.device) -> ScoreTerms | None:
    """Return the score terms of a task on the device of an actor, in a backward pass with sums."""
    terms, is_backward = settings.worker.terms, True in settings.results
    if terms is None:
        return None
    if terms.alibi_slopes is not None:
        terms = replace(terms, alibi_slopes=terms.alibi_slopes.to(device))
    if call.bias is not None:
        packed = call.bias.packed.tensor().to(device)
        held = call.task.held_queries, call.task.held_keys
        *heads, rows, columns = call.bias.shape
        like = replace(terms, bias=packed.new_empty(*heads, 0, 0))
        terms = hold(like, held, has_rows=rows != 1, has_columns=columns != 1)
        assert terms.bias is not None
        unpack(packed, places(terms, terms.bias, call.bias.pieces))
    return terms.with_sums(lse_dtype(settings.results[False][0].dtype)) if is_backward else terms


def sums_of_task(terms: ScoreTerms | None, call: TaskCall) -> list[Tensor]:
    """Return the contributions of a task to the sums of its score terms, packed."""
    if terms is None or not terms.sums:
        return []
    sums = list(terms.sums)
    if call.bias is not None and terms.bias_requires_grad:
        sums[0] = pack(terms, sums[0], call.bias.pieces)
    return sums


def attend_task(
    worker: Worker, task: Task, groups: Sequence[Group], *held: HeldTokens
) -> TaskResults:
    """Compute the output and LSE of a task by query group, from query, key and value."""
    results: TaskResults = {group: [] for group in groups}
    for step, partial in zip(task.steps, worker.run_steps(task.steps, *held), strict=True):
        for (_, tokens), parts in results.items():
            if common := overlap(tokens, step.queries):
                own, rows = (
                    slice(common.start - first, common.stop - first)
                    for first in (step.queries.start, tokens.start)
                )
                parts.append((rows, tuple(tensor[:, :, own] for tensor in partial)))
    return results


def differentiate_task(
    worker: Worker, task: Task, groups: Sequence[Group], *held: HeldTokens
) -> TaskResults:
    """Compute the gradients of a task by group.

    Args:
        worker: Backend and settings of the computation.
        task: The task.
        groups: Groups of queries and of keys whose results are needed.
        held: Query, gradient of the output, output and LSE of the held queries, then key and value
            of the held keys.

    Returns:
        One part for each group, with all its rows: the gradient of the query, or of key and value.
    """
    ranges = task.held_queries, task.held_keys, task.held_keys
    gradients = worker.run_backward(task.steps, *held)
    query_gradient, *key_gradients = map(HeldTokens, gradients, ranges)
    parts: TaskResults = {}
    for group in groups:
        side = key_gradients if group.is_of_keys else [query_gradient]
        rows = tuple(gradient.take([group.tokens]) for gradient in side)
        parts[group] = [(slice(None), rows)]
    return parts


def count_bytes(results: TaskResults) -> int:
    """Return the bytes of the results of a task."""
    return sum(tensor.nbytes for parts in results.values() for _, part in parts for tensor in part)


def _pieces_of(task: Task, bias: Tensor) -> list[Piece]:
    _, _, rows, columns = bias.shape
    return pieces_of(task.steps, has_rows=rows != 1, has_columns=columns != 1)


def _divide_tokens(tokens: range, row_bytes: int) -> list[range]:
    """Divide tokens into equal parts of at most ``GROUP_BYTES``, or one row each."""
    number = min(-(-len(tokens) * row_bytes // GROUP_BYTES), len(tokens))
    bounds = [tokens.start + len(tokens) * i // number for i in range(number + 1)]
    return [range(*ends) for ends in pairwise(bounds)]


ATTEND = TaskPass(attend_task, merge_group)
DIFFERENTIATE = TaskPass(differentiate_task, sum_group)
