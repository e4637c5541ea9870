"""One task on one device."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from cqs.gradients import Gradients
from cqs.partial import Partial, merge_partials
from cqs.scheduler import Step, Task
from cqs.worker.backends import (
    ADD_GRADIENTS,
    ATTEND,
    ATTEND_RECTANGLES,
    GRADIENTS,
    check_backend_name,
    choose_backend,
)
from cqs.worker.held_tokens import HeldTokens, rows_of
from cqs.worker.rectangle import Rectangle


class Worker:
    """Computes tasks; knows nothing of where its tokens come from or its results go."""

    def __init__(self, backend: str | None = None):
        """Compute with the named backend, or for each call with the best that can take it.

        Raises:
            ValueError: if ``backend`` names none.
        """
        check_backend_name(backend)
        self.backend = backend

    def run(
        self, task: Task, query: HeldTokens, key: HeldTokens, value: HeldTokens, *, scale: float
    ) -> list[Partial]:
        """Compute every step of ``task``: one partial result per query row and step.

        Args:
            task: What to compute.
            query: At least the rows ``task.held_queries``.
            key: At least the rows ``task.held_keys``.
            value: The same rows, on the same device.
            scale: Factor on the scores.

        Returns:
            One partial per step, in the order of ``task.steps``, in the dtype of the query.

        Raises:
            NotImplementedError: if the named backend cannot take the tensors.
        """
        return self.run_steps(task.steps, query, key, value, scale=scale)

    def run_steps(
        self,
        steps: Sequence[Step],
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        *,
        scale: float,
        dtype: torch.dtype | None = None,
    ) -> list[Partial]:
        """Compute steps of any number of tasks, in one launch where the backend can.

        Args:
            steps: What to compute.
            query: At least their queries.
            key: At least their keys.
            value: The same rows, on the same device.
            scale: Factor on the scores.
            dtype: Of the outputs, where the backend has a choice; ``None`` means the query's.
        """
        if not steps:
            return []
        name = choose_backend(query.sample, key.sample, value.sample, self.backend)
        if name not in ATTEND_RECTANGLES:
            return [self._run_step(step, query, key, value, scale) for step in steps]
        queries, keys, values = query.joined(), key.joined(), value.joined()
        tensors = queries.tensor, keys.tensor, values.tensor
        rectangles = _rectangles(tuple(steps), queries.ranges, keys.ranges)
        return ATTEND_RECTANGLES[name](*tensors, rectangles, scale=scale, dtype=dtype)

    def run_backward(
        self,
        steps: Sequence[Step],
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        grad_output: HeldTokens,
        output: HeldTokens,
        lse: HeldTokens,
        *,
        scale: float,
        gradients: Gradients | None = None,
    ) -> Gradients:
        """Compute what the pairs of steps contribute to the gradients.

        Args:
            steps: Of any number of tasks.
            query: At least their queries.
            key: At least their keys.
            value: The same rows.
            grad_output: The same rows as ``query``, as are the next two.
            output: Of the whole problem.
            lse: Of the whole problem.
            scale: Factor on the scores.
            gradients: What to add to, one row for each that is held; ``None`` means zeros.

        Returns:
            ``gradients``.
        """
        queries, keys, values = query.joined(), key.joined(), value.joined()
        tensors = queries.tensor, keys.tensor, values.tensor
        gradients = gradients or Gradients.zeros(*tensors)
        if not steps:
            return gradients
        name = choose_backend(*tensors, self.backend)
        if name in ADD_GRADIENTS:
            grad, out = grad_output.joined().tensor, output.joined().tensor
            delta = (out.float() * grad.float()).sum(-1)
            rectangles = _rectangles(tuple(steps), queries.ranges, keys.ranges)
            statistics = grad, lse.joined().tensor, delta
            ADD_GRADIENTS[name](*tensors, *statistics, rectangles, gradients, scale=scale)
            return gradients
        for step in steps:
            whole = [held.take([step.queries]) for held in (query, grad_output, output, lse)]
            for key_ranges, is_causal in _calls(step):
                call = whole[0], key.take(key_ranges), value.take(key_ranges)
                compute = GRADIENTS[choose_backend(*call, self.backend)]
                found = compute(*call, *whole[1:], is_causal=is_causal, scale=scale)
                gradients.query[:, :, _slice(rows_of(step.queries, queries.ranges))] += found[0]
                first = 0
                for tokens in key_ranges:
                    rows, part = rows_of(tokens, keys.ranges), slice(first, first + len(tokens))
                    gradients.key[:, :, _slice(rows)] += found[1][:, :, part]
                    gradients.value[:, :, _slice(rows)] += found[2][:, :, part]
                    first += len(tokens)
        return gradients

    def _run_step(
        self, step: Step, query: HeldTokens, key: HeldTokens, value: HeldTokens, scale: float
    ) -> Partial:
        """Attend to the keys all rows see in one call, and to the diagonal square in another."""
        rows = query.take([step.queries])
        partials = []
        for key_ranges, is_causal in _calls(step):
            tensors = rows, key.take(key_ranges), value.take(key_ranges)
            attend = ATTEND[choose_backend(*tensors, self.backend)]
            partials.append(attend(*tensors, is_causal=is_causal, scale=scale))
        return partials[0] if len(partials) == 1 else merge_partials(partials)


def _calls(step: Step) -> list[tuple[tuple[range, ...], bool]]:
    """Return the calls of a step: its key ranges, and whether they form a causal square."""
    calls = [(step.keys, False)] if step.keys else []
    return calls if step.causal_keys is None else [*calls, ((step.causal_keys,), True)]


@lru_cache(maxsize=64)
def _rectangles(
    steps: tuple[Step, ...], queries: tuple[range, ...], keys: tuple[range, ...]
) -> tuple[Rectangle, ...]:
    """Translate steps into rows of tensors that hold these tokens."""
    return tuple(
        Rectangle(
            rows_of(step.queries, queries),
            tuple(rows_of(tokens, keys) for tokens in step.keys),
            None if step.causal_keys is None else rows_of(step.causal_keys, keys),
        )
        for step in steps
    )


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)
