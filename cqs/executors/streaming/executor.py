"""The executor that computes in this process within a memory budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from cqs.executors.contract import NO_HOOKS, Hooks, Planned
from cqs.executors.streaming.checkpoint import Checkpoint
from cqs.executors.streaming.engine import stream
from cqs.executors.streaming.plan import START, HeldBlock, Pass, StreamPlan
from cqs.executors.streaming.sources import InFile, Source
from cqs.executors.streaming.unit_stream import UnitStream
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler.machines import MACHINES
from cqs.worker import CallBackend
from cqs.worker.backends import BACKENDS

_LEAST_SHARE = 16
"""After an out-of-memory error the budget is halved, down to ``1 / _LEAST_SHARE`` of it."""


@dataclass
class StreamingExecutor:
    """Computes one call by streaming plans; the tensors of its problem may be sources."""

    device: torch.device
    """The device that computes."""
    budget: int
    """Memory budget in bytes."""
    backend: str
    """Backend of all chunks; plans depend on its memory use."""
    inputs: Sequence[Tensor | Source] = ()
    """Tensors and sources whose files must not change during the call."""
    checkpoint: Checkpoint | None = None
    """Saves the progress of a call with files as targets, if given."""

    def __post_init__(self) -> None:
        """Take the fingerprints of the input files, ``None`` for a tensor without a file."""
        self.fingerprints = _fingerprints(self.inputs)

    def make_plan(self, problem: Problem) -> Any:
        """Return the plan of the forward pass of a problem with a single pattern.

        It is a :class:`StreamPlan`, or the :class:`cqs.scheduler.Plan` of a reproducible problem.
        """
        if problem.is_reproducible:
            return problem.make_plan(problem.num_tasks or 1)
        on_gpu = self.device.type == "cuda"
        return StreamPlan(
            problem.query.shape[2],
            problem.key.shape[2],
            problem.shape,
            self.budget,
            is_causal=problem.is_causal,
            pattern=problem.bound_pattern,
            machine=MACHINES["H200" if on_gpu else "CPU"],
            has_single_calls=on_gpu and isinstance(BACKENDS[self.backend], CallBackend),
        ).fit()

    def run(self, part: Planned, into: Partial | None = None, hooks: Hooks = NO_HOOKS) -> Partial:
        """Compute output and LSE; see :meth:`cqs.executors.contract.Executor.run`.

        After an out-of-memory error the blocks that are not final are computed by a plan for half
        of the memory.

        Raises:
            OSError: A file cannot be read or written, or an input file was changed.
            torch.OutOfMemoryError: The device has less than a sixteenth of the memory budget.
        """
        answer = into or part.problem.empty_answer()
        if part.problem.is_reproducible:
            self.unit_stream(part.problem).attend(answer, hooks.progress)
            self._check_files()
            return answer
        problem, plan = part.problem, cast(StreamPlan, part.plan)
        call = self.device, problem, self.backend
        position, progress = START, hooks.progress
        before = 0 if progress is None else progress.done
        if self.checkpoint is not None:
            plan, position = self.checkpoint.next_part()

        def finished(block: HeldBlock) -> None:
            nonlocal position
            self._check_files()
            if self.checkpoint is not None:
                self.checkpoint.add(plan, block, answer)
            position = block.end

        while True:
            if progress is not None:
                progress.move(before + plan.pairs_until(position))
            try:
                stream(plan, *call, answer, start=position, progress=progress, finished=finished)
                return answer
            except RuntimeError as error:
                plan = self._with_less(plan, error)

    def _check_files(self) -> None:
        """Raise OSError if an input file has changed."""
        if _fingerprints(self.inputs) != self.fingerprints:
            raise OSError("an input file was changed while it was read: start again")

    def name_backend(self, part: Planned) -> str:
        """Return the name; see :meth:`cqs.executors.contract.Executor.name_backend`."""
        return self.backend

    def unit_stream(self, problem: Problem, *, with_gradients: bool = False) -> UnitStream:
        """Return the passes of a reproducible problem with a single pattern.

        Args:
            problem: The problem.
            with_gradients: Whether there will be a backward pass.

        Raises:
            ValueError: The memory budget is too small for a unit.
        """
        units = UnitStream(problem, self.backend, self.device, self.make_plan(problem))
        units.check_budget(self.budget, with_gradients=with_gradients)
        return units

    def plan_gradients(self, plan: StreamPlan) -> tuple[StreamPlan, StreamPlan]:
        """Return the plans of the two passes for gradients, given the plan of any pass.

        Raises:
            ValueError: The memory budget is too small for a tile.
        """
        passes = Pass.QUERY_GRADIENTS, Pass.KEY_GRADIENTS
        query_plan, key_plan = (replace(plan, which=which).fit() for which in passes)
        return query_plan, key_plan

    def run_backward(self, part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients; see :meth:`cqs.executors.contract.Executor.run_backward`."""
        if part.problem.is_reproducible:
            return self.unit_stream(part.problem).differentiate(answer, grad_output)
        problem, plan, terms = part.problem, cast(StreamPlan, part.plan), part.problem.terms
        tensors = problem.query, problem.key, problem.value
        gradients = Gradients(*(tensor.new_empty(tensor.shape) for tensor in tensors))
        backward_inputs = grad_output, *answer
        # One pass suffices for the gradients of the leaves of the score terms.
        without_sums = replace(problem, terms=terms and replace(terms, sums=()))
        call, other_call = ((self.device, p, self.backend) for p in (problem, without_sums))
        while True:
            plan, key_plan = self.plan_gradients(plan)
            for total in () if terms is None else terms.sums:
                total.zero_()
            try:
                stream(plan, *call, gradients[:1], backward_inputs=backward_inputs)
                stream(key_plan, *other_call, gradients[1:], backward_inputs=backward_inputs)
                return gradients
            except RuntimeError as error:
                plan = self._with_less(plan, error)

    def _with_less(self, plan: StreamPlan, error: RuntimeError) -> StreamPlan:
        """Return a plan for half the memory after an out-of-memory error, else raise ``error``."""
        budget = min(plan.budget, plan.peak_bytes) // 2
        # PyTorch has no error type for a failed allocation on the CPU.
        is_full = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if not is_full or budget * _LEAST_SHARE < self.budget:
            raise error
        torch.cuda.empty_cache()
        try:
            return replace(plan, budget=budget).fit(plan.heads_at_once)
        except ValueError:  # the budget is too small for a tile
            raise error from None


def _fingerprints(sources: Sequence[Tensor | Source]) -> list[Any]:
    return [list(source.fingerprint) if isinstance(source, InFile) else None for source in sources]
