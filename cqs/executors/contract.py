"""The contract of executors, and the call that all of them share."""

import sys
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from tqdm import tqdm

from cqs.executors.autograd import attend_differentiably, keep_operands
from cqs.executors.observe import observe
from cqs.executors.verify import verify_rows
from cqs.partial import Gradients, Partial
from cqs.problem import Problem
from cqs.scheduler import Plan

Report = bool | Callable[[int, int], None]
"""True draws a progress bar; a function is called with live pairs done and in total."""


class Progress:
    """Counts the live pairs that are done, over all batch elements and query heads."""

    def __init__(self, problem: Problem, make_plan: Callable[[Problem], Plan], report: Report):
        """Start with no pairs done.

        Args:
            problem: The checked problem.
            make_plan: Returns a plan of a part of the problem, which counts its live pairs.
            report: True draws a bar; a function is called with live pairs done and in total.

        Raises:
            TypeError: ``report`` is neither a bool nor a function.
        """
        check_progress(report)
        self._total = sum(
            make_plan(part).live_pairs * part.query.shape[0] * part.query.shape[1]
            for _, part in problem.parts()
        )
        is_silent = report is not True or sys.stderr is None
        self._bar = tqdm(total=self._total, unit="pair", unit_scale=True, disable=is_silent)
        self._report = report if callable(report) else None
        self.done = 0

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()

    def advance(self, pairs: int) -> None:
        """Count more pairs and report; called in the thread that computes or receives them."""
        self.move(self.done + pairs)
        if self._report is not None:
            self._report(self.done, self._total)

    def move(self, done: int) -> None:
        """Set the pairs done without a call of the function; may go back."""
        self._bar.update(done - self.done)
        self.done = done


def check_progress(report: Report) -> None:
    """Raise TypeError unless ``report`` is a bool or a function."""
    if not isinstance(report, bool) and not callable(report):
        raise TypeError(f"progress must be a bool or a function, got {report!r}")


@dataclass(frozen=True)
class Hooks:
    """What an executor does for its caller besides the computation."""

    progress: Progress | None = None
    """Advanced by the live pairs of every finished part of the work, if given."""
    cancelled: threading.Event | None = None
    """Event that makes an executor with several processes stop, if given."""

    def advance(self, problem: Problem, live_pairs: int) -> None:
        """Report that ``live_pairs`` of every head of a problem are done."""
        if self.progress is not None:
            self.progress.advance(live_pairs * problem.query.shape[0] * problem.query.shape[1])


NO_HOOKS = Hooks()


class Planned(NamedTuple):
    """A problem with a single pattern, and the choices by which an executor computes it."""

    problem: Problem
    """The checked problem."""
    plan: Plan
    """A plan for the sequence lengths of the problem."""
    backend: str | None = None
    """Name of a backend; ``None`` means the preferred one."""


class Executor(Protocol):
    """Computes the tasks of a plan somewhere, and merges their results.

    Results are bitwise identical on every executor with the same device and backend. The message of
    an out-of-memory error names the predicted memory and a sufficient number of tasks.
    """

    def run(self, part: Planned, into: Partial | None = None, hooks: Hooks = NO_HOOKS) -> Partial:
        """Compute output and LSE of a problem with a single pattern.

        Args:
            part: The problem, its plan and the backend.
            into: Tensors to write output and LSE to; ``None`` allocates them on the device of the
                query.
            hooks: Progress and cancellation.
        """

    def run_backward(self, part: Planned, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients by the plan of the forward pass, whose result is ``answer``."""

    def name_backend(self, part: Planned) -> str:
        """Return the name of the backend that :meth:`run` uses, or say who chooses it."""


def attend(
    executor: Executor,
    problem: Problem,
    make_plan: Callable[[Problem], Plan],
    *,
    backend: str | None = None,
    verify: bool = False,
    progress: Report = False,
    into: Partial | None = None,
    cancelled: threading.Event | None = None,
) -> Partial:
    """Compute a problem on an executor, with gradients by autograd.

    Args:
        executor: Where the tasks run.
        problem: The checked problem. Per-head patterns are computed in parts.
        make_plan: Returns the plan of a part, the same in forward and backward pass.
        backend: Name of a backend; ``None`` means the preferred one.
        verify: Whether to recompute sampled rows in float64 and compare them.
        progress: True draws a bar; a function is called with live pairs done and in total.
        into: Tensors for output and LSE; the result then has no gradients.
        cancelled: Event that makes an executor with several processes stop.

    Raises:
        TypeError: ``progress`` is neither a bool nor a function.
        VerificationError: ``verify`` found a row that deviates by more than its bound.
        Exception: The executor raised.
    """
    counted = None if progress is False else Progress(problem, make_plan, progress)
    with nullcontext() if counted is None else closing(counted):
        hooks = NO_HOOKS if counted is cancelled is None else Hooks(counted, cancelled)

        def observed(name: str, run: Any, part: Problem, *tensors: Any) -> Any:
            planned = Planned(part, make_plan(part), backend)
            name_backend = partial(executor.name_backend, planned)
            with observe(name, planned.plan, part.num_bytes, name_backend):
                return run(planned, *tensors)

        forward = partial(observed, "forward", partial(executor.run, hooks=hooks))
        backward = partial(observed, "backward", executor.run_backward)
        if into is None:
            attend_part = partial(keep_operands, forward, backward)
            answer = attend_differentiably(problem, attend_part, forward)
        else:
            answer = into
            for where, part in problem.parts():
                forward(part, Partial(into.output[where], into.lse[where]))
    if verify:
        verify_rows(problem, answer)
    return answer
