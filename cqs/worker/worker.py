"""One task on one device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cqs.dropout import Dropout
from cqs.gradients import Gradients
from cqs.partial import Partial, lse_dtype, merge_partials, merge_rows
from cqs.patterns import BoundPattern
from cqs.problem import Problem
from cqs.scheduler import Step, Task
from cqs.worker.backends import (
    ATTEND,
    ATTEND_SHARES,
    BEST_FOR_CALLS,
    BEST_FOR_WHOLE_CALLS,
    GRADIENTS,
    GRADIENTS_OF_SHARES,
    IN_BATCHES,
    WHY_NOT,
    check_backend_name,
    choose_backend,
)
from cqs.worker.calls import add_call_gradients, attend_calls, lse_for_gradients
from cqs.worker.held_tokens import HeldTokens, rows_of
from cqs.worker.work import Work, make_work


@dataclass(frozen=True)
class Worker:
    """Computes tasks; knows nothing of where its tokens come from or its results go."""

    scale: float
    """Factor on the scores."""
    backend: str | None = None
    """Name of a backend; ``None`` takes for each call the best that can compute it."""
    dropout: Dropout | None = None
    pattern: BoundPattern | None = None
    """Which pairs of a step count; ``None`` means what the step says."""

    def __post_init__(self) -> None:
        """Raise ValueError if ``backend`` names none."""
        check_backend_name(self.backend)

    @classmethod
    def of(cls, problem: Problem, backend: str | None = None) -> "Worker":
        """Return what computes the tasks of a problem.

        Raises:
            ValueError: if ``backend`` names none.
        """
        return cls(problem.scale, backend, problem.dropout, problem.bound_pattern)

    def choose_backend(
        self, query: Tensor, key: Tensor, value: Tensor, steps: Sequence[Step] = ()
    ) -> str:
        """Return the name of the backend that computes these steps of such tensors.

        Raises:
            NotImplementedError: if the one named cannot; the message says why.
        """
        is_one_call = len(steps) == 1 and len(steps[0].blocks()) == 1
        best_first = BEST_FOR_WHOLE_CALLS if is_one_call else WHY_NOT
        return self._choose_among(best_first, query, key, value)

    def run(
        self,
        task: Task,
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        *,
        dtype: torch.dtype | None = None,
    ) -> list[Partial]:
        """Compute every step of ``task``: one partial result per query row and step.

        Args:
            task: What to compute.
            query: At least the rows ``task.held_queries``.
            key: At least the rows ``task.held_keys``.
            value: The same rows, on the same device.
            dtype: Of the outputs, where the backend has a choice; ``None`` means the query's.

        Returns:
            One partial per step, in the order of ``task.steps``.

        Raises:
            NotImplementedError: if the named backend cannot take the tensors.
        """
        return self._run_steps(task.steps, query, key, value, dtype)

    def run_together(
        self,
        steps: Sequence[Step],
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        *,
        dtype: torch.dtype | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """Compute steps of any number of tasks into one partial result, at best in one launch.

        Args:
            steps: What to compute; no pair twice.
            query: At least their queries.
            key: At least their keys.
            value: The same rows, on the same device.
            dtype: As for :meth:`run`.
            into: Where to write the result, with adjacent columns; ``None`` means new tensors.

        Returns:
            A row for each query held.
        """
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name in ATTEND_SHARES:
            options = {"is_united": True, "dtype": dtype, "into": into}
            return self._attend_rows(name, steps, query, key, value, **options)
        parts = self._run_steps(steps, query, key, value, dtype)
        rows = [_slice(step.queries, query) for step in steps]
        answer = into or Partial(*(query.empty_like(part) for part in parts[0]))
        merge_rows(answer, list(zip(parts, rows, strict=True)))
        return answer

    def run_into(
        self,
        answer: Partial,
        steps: Sequence[Step],
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
    ) -> None:
        """Compute steps of any number of tasks, with results where they are wanted.

        Args:
            answer: Written to: a row for each query of each step, one step after another; adjacent
                columns.
            steps: As for :meth:`run_together`, as are the rest.
            query: Likewise.
            key: Likewise.
            value: Likewise.
        """
        if not steps:
            return
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name in ATTEND_SHARES:
            self._attend_rows(name, steps, query, key, value, into=answer)
            return
        first = 0
        for step, part in zip(steps, self._run_steps(steps, query, key, value), strict=True):
            rows = slice(first, first + len(step.queries))
            for target, found in zip(answer, part, strict=True):
                target[:, :, rows].copy_(found)
            first = rows.stop

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
        dtype: torch.dtype | None = None,
    ) -> Gradients:
        """Compute what the pairs of steps contribute to the gradients.

        Args:
            steps: Of any number of tasks; no pair twice.
            query: At least their queries.
            key: At least their keys.
            value: The same rows.
            grad_output: The same rows as ``query``, as are the next two.
            output: Of the whole problem.
            lse: Of the whole problem.
            dtype: Of the gradients, where one call or launch makes them; else, and for ``None``,
                it is that in which they add up.

        Returns:
            A row for each token held, however it lies in memory.
        """
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if steps and name in GRADIENTS_OF_SHARES:
            return Gradients(
                *GRADIENTS_OF_SHARES[name](
                    *_join(query, key, value, grad_output, output, lse),
                    self._work(steps, query, key),
                    scale=self.scale,
                    dtype=dtype,
                    **self._drop_rows(query, key),
                )
            )
        held = query, key, value, grad_output, output, lse
        sums = lse_dtype(query.sample.dtype)
        calls = [(step.queries, *call) for step in steps for call in _calls(step)]
        seen = [((queries,), key_ranges) for queries, key_ranges, _ in calls]
        if self.pattern is None and seen == [(query.ranges, key.ranges)]:  # nothing to add up
            found = self._differentiate(*calls[0], *held)
            return Gradients(*(gradient.to(dtype or sums) for gradient in found))
        gradients = Gradients(query.zeros(sums), key.zeros(sums), value.zeros(sums))
        if self.pattern is None:
            for queries, key_ranges, is_causal in calls:
                found = self._differentiate(queries, key_ranges, is_causal, *held)
                gradients.query[:, :, _slice(queries, query)] += found[0]
                first = 0
                for tokens in key_ranges:
                    rows, part = _slice(tokens, key), slice(first, first + len(tokens))
                    gradients.key[:, :, rows] += found[1][:, :, part]
                    gradients.value[:, :, rows] += found[2][:, :, part]
                    first += len(tokens)
        elif steps:
            tensors, drop = _join(*held), self._drop_rows(query, key)
            options = {"scale": self.scale, "in_batches": name in IN_BATCHES, **drop}
            for block_row in self._work(steps, query, key).block_rows:
                add_call_gradients(block_row, GRADIENTS[name], gradients, *tensors, **options)
        return gradients

    def add_gradients(
        self, sums: Sequence[Tensor], steps: Sequence[Step], query: HeldTokens, *held: HeldTokens
    ) -> None:
        """Add what the pairs of steps contribute to the gradients of one side.

        Args:
            sums: float32 (float64 for float64 tensors): that of the queries held, or those of the
                keys and values. Added to.
            steps: As for :meth:`run_backward`, as are the rest.
            query: Likewise.
            held: Key, value, grad_output, output and lse.
        """
        key, value, *_ = held
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name in GRADIENTS_OF_SHARES:
            GRADIENTS_OF_SHARES[name](
                *_join(query, *held),
                self._work(steps, query, key),
                scale=self.scale,
                into=sums,
                **self._drop_rows(query, key),
            )
            return
        of_query, *of_keys = self.run_backward(steps, query, *held)
        for total, part in zip(sums, [of_query] if len(sums) == 1 else of_keys, strict=True):
            total += part

    def _run_steps(
        self,
        steps: Sequence[Step],
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        dtype: torch.dtype | None = None,
    ) -> list[Partial]:
        if not steps:
            return []
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name not in ATTEND_SHARES and self.pattern is None:
            return [self._run_step(step, query, key, value) for step in steps]
        if name not in ATTEND_SHARES:
            tensors, drop = _join(query, key, value), self._drop_rows(query, key)
            options = {"scale": self.scale, "in_batches": name in IN_BATCHES, **drop}
            block_rows = self._work(steps, query, key).block_rows
            return [
                attend_calls(block_row, ATTEND[name], *tensors, **options)
                for block_row in block_rows
            ]
        whole = self._attend_rows(name, steps, query, key, value, dtype=dtype)
        lengths = [len(step.queries) for step in steps]
        return list(map(Partial, *(part.split(lengths, dim=2) for part in whole)))

    def _attend_rows(
        self,
        name: str,
        steps: Sequence[Step],
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        **options: Any,
    ) -> Partial:
        return ATTEND_SHARES[name](
            *_join(query, key, value),
            self._work(steps, query, key),
            scale=self.scale,
            **options,
            **self._drop_rows(query, key),
        )

    def _run_step(
        self, step: Step, query: HeldTokens, key: HeldTokens, value: HeldTokens
    ) -> Partial:
        """Attend to the keys all rows see in one call, and to the diagonal square in another."""
        rows = query.take([step.queries])
        partials = []
        for key_ranges, is_causal in _calls(step):
            tensors = rows, key.take(key_ranges), value.take(key_ranges)
            attend = ATTEND[self._choose_among(BEST_FOR_CALLS, *tensors)]
            options = self._call_options(step.queries, key_ranges, rows)
            partials.append(attend(*tensors, is_causal=is_causal, **options))
        return partials[0] if len(partials) == 1 else merge_partials(partials)

    def _differentiate(
        self,
        queries: range,
        key_ranges: Sequence[range],
        is_causal: bool,
        query: HeldTokens,
        key: HeldTokens,
        value: HeldTokens,
        *of_queries: HeldTokens,
    ) -> Sequence[Tensor]:
        """Compute what one call contributes to the gradients of the tokens that it reads."""
        tensors = query.take([queries]), key.take(key_ranges), value.take(key_ranges)
        compute = GRADIENTS[self._choose_among(BEST_FOR_CALLS, *tensors)]
        options = self._call_options(queries, key_ranges, tensors[0])
        grad_output, output, lse = (held.take([queries]) for held in of_queries)
        lse = lse_for_gradients(lse)
        return compute(*tensors, grad_output, output, lse, is_causal=is_causal, **options)

    def _choose_among(
        self, best_first: Iterable[str], query: Tensor, key: Tensor, value: Tensor
    ) -> str:
        return choose_backend(
            query,
            key,
            value,
            self.backend,
            has_dropout=self.dropout is not None,
            has_pattern=self.pattern is not None,
            best_first=best_first,
        )

    def _call_options(self, queries: range, keys: Sequence[range], query: Tensor) -> dict[str, Any]:
        """Return what a backend of single calls needs to know besides the tensors."""
        if self.dropout is None:
            return {"scale": self.scale}
        kept = self.dropout.kept(self.dropout.random_bits(query, [queries], keys))
        return {"scale": self.scale, "kept": kept, "keep_scale": self.dropout.scale}

    def _work(self, steps: Iterable[Step], query: HeldTokens, key: HeldTokens) -> Work:
        return make_work(tuple(steps), self.pattern, query.ranges, key.ranges)

    def _drop_rows(self, query: HeldTokens, key: HeldTokens) -> dict[str, Any]:
        """Return what a backend of whole tasks needs to drop pairs."""
        if self.dropout is None:
            return {}
        bits = self.dropout.random_bits(query.sample, query.ranges, key.ranges)
        return {"dropout": self.dropout, "dropout_bits": bits}


def _calls(step: Step) -> list[tuple[tuple[range, ...], bool]]:
    """Return the calls of a step: its key ranges, and whether they form a causal square."""
    calls = [(step.keys, False)] if step.keys else []
    return calls if step.causal_keys is None else [*calls, ((step.causal_keys,), True)]


def _join(*held: HeldTokens) -> tuple[Tensor, ...]:
    return tuple(tokens.joined() for tokens in held)


def _slice(tokens: range, held: HeldTokens) -> slice:
    """Return the rows of ``tokens`` among all that are held."""
    rows = rows_of(tokens, held.ranges)
    return slice(rows.start, rows.stop)
