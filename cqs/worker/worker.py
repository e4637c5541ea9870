"""Computation of tasks on one device, by the backend that supports them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cqs.partial import Gradients, Partial, lse_dtype, merge_partials, merge_rows
from cqs.patterns import BoundPattern
from cqs.problem import Dropout, Problem
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
from cqs.worker.operands import Operands
from cqs.worker.work import Work, make_work

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Worker:
    """Computes tasks from the tokens that it is given; it neither sends nor receives them.

    Its methods take the held tokens of query ``[batch, num_heads, rows_q, head_dim]``, key
    ``[batch, num_kv_heads, rows_kv, head_dim]`` and value ``[batch, num_kv_heads, rows_kv,
    value_dim]``, in this order. They must include the tokens of the steps, and key and value must
    hold the same tokens.
    """

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

    def run(self, task: Task, *held: HeldTokens, dtype: torch.dtype | None = None) -> list[Partial]:
        """Compute the partial output of every step of a task.

        Args:
            task: The task.
            held: Query, key and value.
            dtype: Dtype of the outputs, if the backend supports a choice; ``None`` means that of
                the query.

        Returns:
            One partial output for each step, in the order of ``task.steps``.

        Raises:
            NotImplementedError: The named backend does not support the tensors or options.
            KeyError: A token is not held.
        """
        return self._run_steps(task.steps, *held, dtype=dtype)

    def run_together(
        self,
        steps: Sequence[Step],
        *held: HeldTokens,
        dtype: torch.dtype | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """Compute steps of any number of tasks into one partial output.

        The backend ``triton`` uses one launch for each pair of strides of the pattern.

        Args:
            steps: The steps; no pair may be in two of them.
            held: Query, key and value.
            dtype: Dtype of the output, if the backend supports a choice; ``None`` means that of
                the query.
            into: Tensors with a last stride of 1 to write to; ``None`` means new ones.

        Returns:
            The partial output of all queries held, one row for each; ``into`` if that is given.
        """
        name = self._choose_for(steps, held)
        if name in ATTEND_BLOCK_ROWS:
            options = {"is_united": True, "dtype": dtype, "into": into}
            return self._launch(ATTEND_BLOCK_ROWS[name], steps, held, **options)
        parts = self._run_steps(steps, *held, dtype=dtype)
        rows = [_slice(step.queries, held[0]) for step in steps]
        answer = into or Partial(*(held[0].empty_like(part) for part in parts[0]))
        merge_rows(answer, list(zip(parts, rows, strict=True)))
        return answer

    def run_into(self, answer: Partial, steps: Sequence[Step], *held: HeldTokens) -> None:
        """Compute steps of any number of tasks and write their partial outputs to tensors.

        Args:
            answer: Output ``[batch, num_heads, rows, value_dim]`` and LSE ``[batch, num_heads,
                rows]`` with a last stride of 1; written to. The rows are the queries of each step,
                one step after another.
            steps: The steps; no pair may be in two of them.
            held: Query, key and value.
        """
        if not steps:
            return
        name = self._choose_for(steps, held)
        if name in ATTEND_BLOCK_ROWS:
            self._launch(ATTEND_BLOCK_ROWS[name], steps, held, into=answer)
            return
        first = 0
        for step, part in zip(steps, self._run_steps(steps, *held), strict=True):
            rows = slice(first, first + len(step.queries))
            for target, found in zip(answer, part, strict=True):
                target[:, :, rows].copy_(found)
            first = rows.stop

    def run_backward(
        self, steps: Sequence[Step], *held: HeldTokens, dtype: torch.dtype | None = None
    ) -> Gradients:
        """Compute the contribution of steps to the gradients.

        Args:
            steps: Steps of any number of tasks; no pair may be in two of them.
            held: Query, key and value; gradient of the output, ``[batch, num_heads, rows_q,
                value_dim]``; output of the whole problem, in the same shape; LSE of the whole
                problem, ``[batch, num_heads, rows_q]``.
            dtype: Dtype of the gradients if one call or launch computes them. Sums of several, and
                ``None``, have float32 (float64 for float64 tensors).

        Returns:
            Gradients of all tokens held, in any memory layout.
        """
        query, key, value, *_ = held
        name = self._choose_for(steps, held)
        if steps and name in GRADIENTS_OF_BLOCK_ROWS:
            return Gradients(*self._launch(GRADIENTS_OF_BLOCK_ROWS[name], steps, held, dtype=dtype))
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
            operands, options = self._all_rows(name, held)
            of_queries = _join(*held[3:])
            for row in self._work(steps, held).block_rows:
                add_call_gradients(
                    row, GRADIENTS[name], gradients, operands, *of_queries, **options
                )
        return gradients

    def add_gradients(
        self, sums: Sequence[Tensor], steps: Sequence[Step], *held: HeldTokens
    ) -> None:
        """Add the contribution of steps to the gradient of the queries, or to those of the keys.

        Args:
            sums: float32 (float64 for float64 tensors) sums that are added to: the gradient of the
                queries held, or the gradients of the keys and values held.
            steps: Steps of any number of tasks; no pair may be in two of them.
            held: The tensors of :meth:`run_backward`.
        """
        name = self._choose_for(steps, held)
        if name in GRADIENTS_OF_BLOCK_ROWS:
            self._launch(GRADIENTS_OF_BLOCK_ROWS[name], steps, held, into=sums)
            return
        of_query, *of_keys = self.run_backward(steps, *held)
        for total, part in zip(sums, [of_query] if len(sums) == 1 else of_keys, strict=True):
            total += part

    def _choose_for(self, steps: Sequence[Step], held: Sequence[HeldTokens]) -> str:
        query, key, value, *_ = held
        return self.choose_backend(query.sample, key.sample, value.sample, steps)

    def _run_steps(
        self, steps: Sequence[Step], *held: HeldTokens, dtype: torch.dtype | None = None
    ) -> list[Partial]:
        if not steps:
            return []
        name = self._choose_for(steps, held)
        if name not in ATTEND_BLOCK_ROWS and self.pattern is None:
            return [self._run_step(step, *held) for step in steps]
        if name not in ATTEND_BLOCK_ROWS:
            operands, options = self._all_rows(name, held)
            rows = self._work(steps, held).block_rows
            return [attend_calls(row, ATTEND[name], operands, **options) for row in rows]
        whole = self._launch(ATTEND_BLOCK_ROWS[name], steps, held, dtype=dtype)
        lengths = [len(step.queries) for step in steps]
        return list(map(Partial, *(part.split(lengths, dim=2) for part in whole)))

    def _launch(
        self,
        compute: Callable[..., _Found],
        steps: Sequence[Step],
        held: Sequence[HeldTokens],
        **options: Any,
    ) -> _Found:
        """Call a function of a backend that computes whole tasks."""
        work, dropout = self._work(steps, held), self._dropout_options(held)
        return compute(*_join(*held), work, scale=self.scale, **options, **dropout)

    def _all_rows(self, name: str, held: Sequence[HeldTokens]) -> tuple[Operands, dict[str, Any]]:
        """Return all held rows, and the options of the calls that a pattern is cut into."""
        query, key, value = _join(*held[:3])
        options = {"in_batches": name in IN_BATCHES, **self._dropout_options(held)}
        return Operands(query, key, value, False, self.scale), options

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
            partials.append(attend(Operands(*tensors, is_causal, **options)))
        return partials[0] if len(partials) == 1 else merge_partials(partials)

    def _differentiate(
        self, queries: range, key_ranges: Sequence[range], is_causal: bool, *held: HeldTokens
    ) -> Sequence[Tensor]:
        """Compute the gradients of one call, for the tokens that it reads."""
        query, key, value, *of_queries = held
        tensors = query.take([queries]), key.take(key_ranges), value.take(key_ranges)
        compute = GRADIENTS[self._choose_among(BEST_FOR_CALLS, *tensors)]
        options = self._call_options(queries, key_ranges, tensors[0])
        grad_output, output, lse = (each.take([queries]) for each in of_queries)
        lse = lse_for_gradients(lse)
        return compute(Operands(*tensors, is_causal, **options), grad_output, output, lse)

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

    def _work(self, steps: Iterable[Step], held: Sequence[HeldTokens]) -> Work:
        return make_work(tuple(steps), self.pattern, held[0].ranges, held[1].ranges)

    def _dropout_options(self, held: Sequence[HeldTokens]) -> dict[str, Any]:
        """Return the keyword arguments for dropout of a backend that computes whole tasks."""
        if self.dropout is None:
            return {}
        query, key, *_ = held
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
