"""Computation of tasks on one device, by the backend that supports them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from cqs.partial import Gradients, Partial, lse_dtype, merge_own, merge_rows
from cqs.patterns import BoundPattern
from cqs.problem import Problem
from cqs.problem.dropout import Dropout
from cqs.problem.score_terms import ScoreTerms
from cqs.problem.scores import add_sinks
from cqs.ranges import rows_of
from cqs.scheduler import Step
from cqs.worker.backend import Backend, CallBackend, TaskBackend
from cqs.worker.backends import BACKENDS, BEST_FOR_WHOLE_CALLS, choose_backend
from cqs.worker.calls import add_call_gradients, attend_call, attend_calls, lse_for_gradients
from cqs.worker.held_tokens import HeldTokens
from cqs.worker.operands import Operands, TaskOperands
from cqs.worker.reference import REFERENCE
from cqs.worker.work import make_work

_StepCall = tuple[range, tuple[range, ...], bool]
"""Queries and key ranges that a backend computes at once, and whether they are a causal square."""


@dataclass(frozen=True)
class Worker:
    """Computes tasks from the tokens that it is given; it neither sends nor receives them.

    Its methods take the held tokens of query ``[batch, num_heads, rows_q, head_dim]``, key
    ``[batch, num_kv_heads, rows_kv, head_dim]`` and value ``[batch, num_kv_heads, rows_kv,
    value_dim]``, in this order. They must include the tokens of the steps, and key and value must
    hold the same tokens.
    """

    is_unit: ClassVar[bool] = False
    """Whether results must not depend on the number of heads, nor on which tokens are adjacent."""
    scale: float
    """Factor on the scores."""
    backend: str | None = None
    """Name of a backend; ``None`` means the preferred one that supports the call."""
    dropout: Dropout | None = None
    """Dropout of the attention probabilities, or ``None``."""
    pattern: BoundPattern | None = None
    """Pattern that masks pairs of the steps, or ``None``."""
    chosen: Backend | None = None
    """Backend of all steps, from :meth:`choose_backend`; ``None`` chooses one for each call."""
    terms: ScoreTerms | None = None
    """Score terms: soft cap, ALiBi, bias and score function, or ``None``."""

    @classmethod
    def of(
        cls, problem: Problem, backend: str | None = None, steps: Sequence[Step] | None = None
    ) -> Self:
        """Return the worker that computes the tasks of a problem.

        Args:
            problem: The checked problem.
            backend: Name of a backend; ``None`` means the preferred one.
            steps: Steps of the problem's own tensors, for which a backend is chosen once; ``None``
                chooses one for each call of a method, as units always do.

        Raises:
            ValueError: ``backend`` is not the name of a backend.
            NotImplementedError: The named backend does not support the problem.
        """
        options = backend, problem.dropout, problem.bound_pattern
        chosen = None
        if steps is not None and not cls.is_unit:
            tensors = problem.query, problem.key, problem.value
            chosen = choose_backend(*tensors, *options, problem.terms, _best_first(steps))
        return cls(problem.scale, *options, chosen, problem.terms)

    def choose_backend(
        self, query: Tensor, key: Tensor, value: Tensor, steps: Sequence[Step] = ()
    ) -> Backend:
        """Return the backend that computes steps of these tensors.

        Args:
            query: ``[batch, num_heads, rows_q, head_dim]``.
            key: ``[batch, num_kv_heads, rows_kv, head_dim]``.
            value: ``[batch, num_kv_heads, rows_kv, value_dim]``.
            steps: The steps. A single call prefers other backends than several calls.

        Raises:
            NotImplementedError: The named backend does not support the tensors or options. The
                message gives the reason.
        """
        options = self.backend, self.dropout, self.pattern, self.terms
        return choose_backend(query, key, value, *options, _best_first(steps))

    def run_steps(
        self,
        steps: Sequence[Step],
        *held: HeldTokens,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
        into: Partial | None = None,
    ) -> list[Partial]:
        """Compute one partial output for each step.

        Args:
            steps: The steps; no pair may be in two of them.
            held: Query, key and value.
            sinks: Sinks of the heads, ``[num_heads]``, if the steps have all keys of their queries.
            dtype: Dtype of the outputs, if the backend supports a choice; ``None`` means that of
                the query.
            into: Tensors with a last stride of 1 to write to: the queries of each step, one step
                after another. ``None`` means new ones.

        Returns:
            One partial output for each step, in their order.

        Raises:
            NotImplementedError: The named backend does not support the tensors or options.
            KeyError: A token is not held.
        """
        if not steps:
            return []
        backend = self.chosen or self._choose_for(steps, held)
        if isinstance(backend, TaskBackend):
            lengths = [len(step.queries) for step in steps]
            options = {"sinks": sinks, "dtype": dtype, "into": into}
            whole = backend.attend(self._task_operands(steps, held), **options)
            return list(map(Partial, *(part.split(lengths, dim=2) for part in whole)))
        assert isinstance(backend, CallBackend)
        if self.pattern is None:
            parts = [self._run_step(backend, step, held) for step in steps]
        else:
            parts = attend_calls(backend, self._task_operands(steps, held))
        if sinks is not None:
            parts = [add_sinks(part, sinks) for part in parts]
        if into is not None:
            for target, tensors in zip(into, zip(*parts, strict=True), strict=True):
                torch.cat(tensors, dim=2, out=target)
        return parts

    def run_together(
        self,
        steps: Sequence[Step],
        *held: HeldTokens,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """Compute steps of any number of tasks into one partial output.

        The backend ``triton`` uses one launch for each pair of steps between adjacent rows, and
        between adjacent columns, in the pattern.

        Args:
            steps: The steps; no pair may be in two of them.
            held: Query, key and value.
            sinks: Sinks of the heads, ``[num_heads]``, if the steps have all keys of their queries.
            dtype: Dtype of the output, if the backend supports a choice; ``None`` means that of
                the query.
            into: Tensors with a last stride of 1 to write to; ``None`` means new ones.

        Returns:
            The partial output of all queries held, one row for each; ``into`` if that is given.
        """
        backend = self.chosen or self._choose_for(steps, held)
        if isinstance(backend, TaskBackend):
            operands = self._task_operands(steps, held)
            return backend.attend(operands, is_united=True, sinks=sinks, dtype=dtype, into=into)
        if into is None and len(steps) == 1 and held[0].ranges == (steps[0].queries,):
            return self.run_steps(steps, *held, sinks=sinks, dtype=dtype)[0]  # nothing to merge
        parts = self.run_steps(steps, *held, dtype=dtype)
        rows = [_held_rows(step.queries, held[0]) for step in steps]
        answer = into or Partial(*(held[0].empty_like(part) for part in parts[0]))
        # Overwrites all rows: those of no step get output 0 and LSE -inf.
        merge_rows(answer, list(zip(parts, rows, strict=True)))
        return answer if sinks is None else add_sinks(answer, sinks)

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
        query, key, *_ = held
        backend = self.chosen or self._choose_for(steps, held)
        if steps and isinstance(backend, TaskBackend):
            operands = self._task_operands(steps, held)
            return Gradients(*backend.differentiate(operands, *_whole(*held[3:]), dtype=dtype))
        sums = lse_dtype(query.sample.dtype)
        calls = [call for step in steps for call in _step_calls(step)]
        seen = [((queries,), keys) for queries, keys, _ in calls]
        if self.pattern is None and seen == [(query.ranges, key.ranges)]:  # nothing to add up
            call_gradients = self._differentiate(backend, calls[0], held)
            return Gradients(*(gradient.to(dtype or sums) for gradient in call_gradients))
        gradients = Gradients(*(own.empty_like(own.sample, sums).zero_() for own in held[:3]))
        if self.pattern is None:
            for call in calls:
                queries, keys, _ = call
                parts, read = self._differentiate(backend, call, held), ((queries,), keys, keys)
                for total, part, tokens, ranges in zip(gradients, parts, held, read, strict=False):
                    for own, rows in zip(ranges, HeldTokens(part, ranges).split(), strict=True):
                        total[:, :, _held_rows(own, tokens)] += rows
        elif steps:
            assert isinstance(backend, CallBackend)
            operands = self._task_operands(steps, held)
            add_call_gradients(backend, gradients, operands, *_whole(*held[3:]))
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
        backend = self.chosen or self._choose_for(steps, held)
        if isinstance(backend, TaskBackend):
            backend.differentiate(self._task_operands(steps, held), *_whole(*held[3:]), into=sums)
            return
        grad_query, *kv_gradients = self.run_backward(steps, *held)
        for total, part in zip(sums, [grad_query] if len(sums) == 1 else kv_gradients, strict=True):
            total += part

    def _choose_for(self, steps: Sequence[Step], held: Sequence[HeldTokens]) -> Backend:
        query, key, value, *_ = held
        return self.choose_backend(query.sample, key.sample, value.sample, steps)

    def _task_operands(self, steps: Sequence[Step], held: Sequence[HeldTokens]) -> TaskOperands:
        """Return all held rows of query, key and value, and the work of the steps in them."""
        (query, key, value), dropout, bits = held[:3], self.dropout, None
        if dropout is not None:
            bits = dropout.random_bits(query.sample, query.ranges, key.ranges)
        distance, terms = (0 if self.is_unit else None), None
        if self.terms is not None and self.terms.alibi_slopes is not None:
            distance = self.terms.distance
        work = make_work(tuple(steps), self.pattern, query.ranges, key.ranges, distance)
        tensors = query.joined(), key.joined(), value.joined()
        if self.terms is not None:
            terms = self.terms.pair_terms(query.sample.device, query.ranges, key.ranges)
        return TaskOperands(*tensors, work, self.scale, dropout, bits, terms, self.is_unit)

    def _run_step(self, backend: CallBackend, step: Step, held: Sequence[HeldTokens]) -> Partial:
        """Compute a step in two calls: the keys that all rows attend to, and the causal square."""
        partials = []
        for call in _step_calls(step):
            partials.append(attend_call(*self._operands(backend, call, held)))
        return partials[0] if len(partials) == 1 else merge_own(partials)

    def _differentiate(
        self, backend: Backend, call: _StepCall, held: Sequence[HeldTokens]
    ) -> Sequence[Tensor]:
        """Compute the gradients of one call, for the tokens that it reads."""
        assert isinstance(backend, CallBackend)
        backend, operands = self._operands(backend, call, held)
        grad_output, output, lse = (tokens.take([call[0]]) for tokens in held[3:])
        return backend.differentiate(operands, grad_output, output, lse_for_gradients(lse))

    def _operands(
        self, backend: CallBackend, call: _StepCall, held: Sequence[HeldTokens]
    ) -> tuple[CallBackend, Operands]:
        """Return the backend and the operands of one call.

        The reference computes a call with fewer keys than the task's backend supports.
        """
        queries, keys, is_causal = call
        query, key, value = held[0].take([queries]), held[1].take(keys), held[2].take(keys)
        kept, keep_scale = None, 1.0
        if self.dropout is not None:
            kept = self.dropout.kept(self.dropout.random_bits(query, [queries], keys))
            keep_scale = self.dropout.scale
        terms = None
        if self.terms is not None:
            terms = self.terms.pair_terms(query.device, [queries], keys)
        options = None, kept, keep_scale, terms
        operands = Operands(query, key, value, is_causal, self.scale, *options)
        return backend if key.shape[2] >= backend.least_keys else REFERENCE, operands


def _best_first(steps: Sequence[Step]) -> Iterable[str]:
    """Return the names of the backends; a single call prefers others than several calls."""
    is_one_call = len(steps) == 1 and len(steps[0].blocks()) == 1
    return BEST_FOR_WHOLE_CALLS if is_one_call else BACKENDS


@lru_cache(maxsize=1024)
def _step_calls(step: Step) -> list[_StepCall]:
    """Return the calls of a step: one for its keys, and one for its causal square."""
    calls = [(step.queries, step.keys, False)] if step.keys else []
    square = step.causal_keys
    return calls if square is None else [*calls, (step.queries, (square,), True)]


def _whole(*held: HeldTokens) -> tuple[Tensor, ...]:
    """Return one tensor for each sequence, with all of its tokens."""
    return tuple(tokens.joined() for tokens in held)


def _held_rows(tokens: range, held: HeldTokens) -> slice:
    """Return the rows of ``tokens`` among all that are held."""
    rows = rows_of(tokens, held.ranges)
    return slice(rows.start, rows.stop)
