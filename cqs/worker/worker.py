"""Computation of tasks on one device, by the backend that supports them."""

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
    ATTEND_BLOCK_ROWS,
    BEST_FOR_CALLS,
    BEST_FOR_WHOLE_CALLS,
    GRADIENTS,
    GRADIENTS_OF_BLOCK_ROWS,
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
    """Computes tasks from the tokens that it is given; it neither sends nor receives them."""

    scale: float
    """Factor on the scores."""
    backend: str | None = None
    """Name of a backend; ``None`` means the preferred one that supports the call."""
    dropout: Dropout | None = None
    """Dropout of the attention probabilities, or ``None``."""
    pattern: BoundPattern | None = None
    """Pattern that masks pairs of the steps, or ``None``."""

    def __post_init__(self) -> None:
        """Raise ValueError if ``backend`` is not the name of a backend."""
        check_backend_name(self.backend)

    @classmethod
    def of(cls, problem: Problem, backend: str | None = None) -> "Worker":
        """Return the worker that computes the tasks of a problem.

        Raises:
            ValueError: ``backend`` is not the name of a backend.
        """
        return cls(problem.scale, backend, problem.dropout, problem.bound_pattern)

    def choose_backend(
        self, query: Tensor, key: Tensor, value: Tensor, steps: Sequence[Step] = ()
    ) -> str:
        """Return the name of the backend that computes steps of these tensors.

        Args:
            query: ``[batch, num_heads, rows_q, head_dim]``.
            key: ``[batch, num_kv_heads, rows_kv, head_dim]``.
            value: ``[batch, num_kv_heads, rows_kv, value_dim]``.
            steps: The steps. A single call prefers other backends than several calls.

        Raises:
            NotImplementedError: The named backend does not support the tensors or options. The
                message gives the reason.
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
        """Compute the partial output of every step of a task.

        Args:
            task: The task.
            query: Queries, ``[batch, num_heads, rows_q, head_dim]``, at least those of the task.
            key: Keys, ``[batch, num_kv_heads, rows_kv, head_dim]``, at least those of the task.
            value: Values, ``[batch, num_kv_heads, rows_kv, value_dim]``, of the tokens of ``key``.
            dtype: Dtype of the outputs, if the backend supports a choice; ``None`` means that of
                the query.

        Returns:
            One partial output for each step, in the order of ``task.steps``.

        Raises:
            NotImplementedError: The named backend does not support the tensors or options.
            KeyError: A token is not held.
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
        """Compute steps of any number of tasks into one partial output.

        The backend ``triton`` uses one launch for each pair of strides of the pattern.

        Args:
            steps: The steps; no pair may be in two of them.
            query: Queries, ``[batch, num_heads, rows_q, head_dim]``, at least those of the steps.
            key: Keys, ``[batch, num_kv_heads, rows_kv, head_dim]``, at least those of the steps.
            value: Values, ``[batch, num_kv_heads, rows_kv, value_dim]``, of the tokens of ``key``.
            dtype: Dtype of the output, if the backend supports a choice; ``None`` means that of
                the query.
            into: Tensors with a last stride of 1 to write to; ``None`` means new ones.

        Returns:
            The partial output of all queries held, one row for each; ``into`` if that is given.
        """
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name in ATTEND_BLOCK_ROWS:
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
        """Compute steps of any number of tasks and write their partial outputs to tensors.

        Args:
            answer: Output ``[batch, num_heads, rows, value_dim]`` and LSE ``[batch, num_heads,
                rows]`` with a last stride of 1; written to. The rows are the queries of each step,
                one step after another.
            steps: The steps; no pair may be in two of them.
            query: Queries, ``[batch, num_heads, rows_q, head_dim]``, at least those of the steps.
            key: Keys, ``[batch, num_kv_heads, rows_kv, head_dim]``, at least those of the steps.
            value: Values, ``[batch, num_kv_heads, rows_kv, value_dim]``, of the tokens of ``key``.
        """
        if not steps:
            return
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name in ATTEND_BLOCK_ROWS:
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
        """Compute the contribution of steps to the gradients.

        Args:
            steps: Steps of any number of tasks; no pair may be in two of them.
            query: Queries, ``[batch, num_heads, rows_q, head_dim]``, at least those of the steps.
            key: Keys, ``[batch, num_kv_heads, rows_kv, head_dim]``, at least those of the steps.
            value: Values, ``[batch, num_kv_heads, rows_kv, value_dim]``, of the tokens of ``key``.
            grad_output: Gradient of the output, ``[batch, num_heads, rows_q, value_dim]``, of the
                tokens of ``query``.
            output: Output of the whole problem, ``[batch, num_heads, rows_q, value_dim]``.
            lse: LSE of the whole problem, ``[batch, num_heads, rows_q]``.
            dtype: Dtype of the gradients if one call or launch computes them. Sums of several, and
                ``None``, have float32 (float64 for float64 tensors).

        Returns:
            Gradients of all tokens held, in any memory layout.
        """
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if steps and name in GRADIENTS_OF_BLOCK_ROWS:
            return Gradients(
                *GRADIENTS_OF_BLOCK_ROWS[name](
                    *_join(query, key, value, grad_output, output, lse),
                    self._work(steps, query, key),
                    scale=self.scale,
                    dtype=dtype,
                    **self._dropout_options(query, key),
                )
            )
        held = query, key, value, grad_output, output, lse
        sums = lse_dtype(query.sample.dtype)
        calls = [(step.queries, *call) for step in steps for call in _calls(step)]
        seen = [((queries,), key_ranges) for queries, key_ranges, _ in calls]
        if self.pattern is None and seen == [
            (query.ranges, key.ranges)
        ]:  # a single call: there is no sum
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
            tensors, drop = _join(*held), self._dropout_options(query, key)
            options = {"scale": self.scale, "in_batches": name in IN_BATCHES, **drop}
            for block_row in self._work(steps, query, key).block_rows:
                add_call_gradients(block_row, GRADIENTS[name], gradients, *tensors, **options)
        return gradients

    def add_gradients(
        self, sums: Sequence[Tensor], steps: Sequence[Step], query: HeldTokens, *held: HeldTokens
    ) -> None:
        """Add the contribution of steps to the gradient of the queries, or to those of the keys.

        Args:
            sums: float32 (float64 for float64 tensors) sums that are added to: the gradient of the
                queries held, or the gradients of the keys and values held.
            steps: Steps of any number of tasks; no pair may be in two of them.
            query: Queries, ``[batch, num_heads, rows_q, head_dim]``, at least those of the steps.
            held: Key, value, gradient of the output, output and LSE, as in :meth:`run_backward`.
        """
        key, value, *_ = held
        name = self.choose_backend(query.sample, key.sample, value.sample, steps)
        if name in GRADIENTS_OF_BLOCK_ROWS:
            GRADIENTS_OF_BLOCK_ROWS[name](
                *_join(query, *held),
                self._work(steps, query, key),
                scale=self.scale,
                into=sums,
                **self._dropout_options(query, key),
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
        if name not in ATTEND_BLOCK_ROWS and self.pattern is None:
            return [self._run_step(step, query, key, value) for step in steps]
        if name not in ATTEND_BLOCK_ROWS:
            tensors, drop = _join(query, key, value), self._dropout_options(query, key)
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
        return ATTEND_BLOCK_ROWS[name](
            *_join(query, key, value),
            self._work(steps, query, key),
            scale=self.scale,
            **options,
            **self._dropout_options(query, key),
        )

    def _run_step(
        self, step: Step, query: HeldTokens, key: HeldTokens, value: HeldTokens
    ) -> Partial:
        """Compute a step in two calls: the keys that all rows attend to, and the causal square."""
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
        """Compute the gradients of one call, for the tokens that it reads."""
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
        """Return the keyword arguments of a backend that computes one call at a time."""
        if self.dropout is None:
            return {"scale": self.scale}
        kept = self.dropout.kept(self.dropout.random_bits(query, [queries], keys))
        return {"scale": self.scale, "kept": kept, "keep_scale": self.dropout.scale}

    def _work(self, steps: Iterable[Step], query: HeldTokens, key: HeldTokens) -> Work:
        return make_work(tuple(steps), self.pattern, query.ranges, key.ranges)

    def _dropout_options(self, query: HeldTokens, key: HeldTokens) -> dict[str, Any]:
        """Return the keyword arguments for dropout of a backend that computes whole tasks."""
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
