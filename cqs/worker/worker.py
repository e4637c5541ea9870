"""One task on one device."""

from collections.abc import Sequence

import torch

from cqs.partial import Partial, merge_partials
from cqs.scheduler import Step, Task
from cqs.worker.backends import ATTEND, ATTEND_RECTANGLES, check_backend_name, choose_backend
from cqs.worker.held_tokens import HeldTokens
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
        rectangles = [
            Rectangle(
                queries.rows(step.queries),
                tuple(map(keys.rows, step.keys)),
                None if step.causal_keys is None else keys.rows(step.causal_keys),
            )
            for step in steps
        ]
        tensors = queries.tensor, keys.tensor, values.tensor
        return ATTEND_RECTANGLES[name](*tensors, rectangles, scale=scale, dtype=dtype)

    def _run_step(
        self, step: Step, query: HeldTokens, key: HeldTokens, value: HeldTokens, scale: float
    ) -> Partial:
        """Attend to the keys all rows see in one call, and to the diagonal square in another."""
        calls = [(step.keys, False)] if step.keys else []
        if step.causal_keys is not None:
            calls.append(((step.causal_keys,), True))
        rows = query.take([step.queries])
        partials = []
        for key_ranges, is_causal in calls:
            tensors = rows, key.take(key_ranges), value.take(key_ranges)
            attend = ATTEND[choose_backend(*tensors, self.backend)]
            partials.append(attend(*tensors, is_causal=is_causal, scale=scale))
        return partials[0] if len(partials) == 1 else merge_partials(partials)
