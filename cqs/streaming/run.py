"""Attention within a budget, from whatever holds the tensors to whatever takes the answer."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cqs.autograd import Attended, Kept, attend_differentiably
from cqs.gradients import Gradients
from cqs.partial import Partial, lse_dtype
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem
from cqs.streaming.attention import Streamed
from cqs.streaming.budget import parse_budget
from cqs.streaming.checkpoint import Checkpoint
from cqs.streaming.plan import (
    CPU,
    GPU,
    START,
    Block,
    Pass,
    Position,
    StreamPlan,
    Visit,
    make_stream_plan,
)
from cqs.streaming.sources import InFile, InMemory, Source, as_source, as_target
from cqs.verify import VerificationError, verify_rows
from cqs.worker import Worker

_NAMES = ("query", "key", "value")
_LEAST_SHARE = 16
"""An allocation that fails is tried again with half the budget, down to one part in so many."""

Progress = bool | Callable[[int, int], None]


def attend_within(
    query: Any,
    key: Any,
    value: Any,
    *,
    memory_budget: int | str,
    device: "torch.device | str | None" = None,
    out: Any = None,
    resume: "str | os.PathLike[str] | None" = None,
    progress: Progress = False,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    backend: str | None = None,
    verify: bool = False,
) -> Partial:
    """Compute attention of tensors that are not on the device; see :func:`cqs.attention`.

    The answer is on the CPU, its output ``out`` if that is given.
    """
    tensors = (query, key, value)
    sources = tuple(map(as_source, _NAMES, tensors))
    problem = check_problem(
        *(
            tensor if isinstance(tensor, Tensor) else _stand_in(source.shape, source.dtype)
            for tensor, source in zip(tensors, sources, strict=True)
        ),
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
    )
    if problem.differs_by_head:
        raise NotImplementedError(
            f"a memory budget is for one pattern of all heads, got {pattern!r}"
        )
    where = _choose_device(device)
    run = _Run(
        problem,
        where,
        parse_budget(memory_budget, where),
        backend,
        out,
        None if resume is None else Path(resume),
        progress,
    )
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )
    if needs_grad and (out is not None or resume is not None):
        raise ValueError("out= and resume= record no gradients: detach the tensors")
    answer = (
        attend_differentiably(problem, run.attend_and_keep) if needs_grad else run.attend(*sources)
    )
    if verify:
        _verify(problem, sources, answer)
    return answer


@dataclass(frozen=True)
class _Run:
    problem: Problem
    """Checked; its tensors may stand for what is elsewhere."""
    device: torch.device
    budget: int
    backend: str | None
    out: Any
    resume: Path | None
    progress: Progress

    def attend(self, *sources: Source) -> Partial:
        """Compute the answer, and go on with less memory where there is too little."""
        problem, streamed = self.problem, self._streamed(*sources)
        shape = (*problem.query.shape[:3], problem.value.shape[3])
        dtype = problem.query.dtype
        output = torch.empty(shape, dtype=dtype) if self.out is None else self.out
        target = as_target(output, shape, dtype)
        plan, position, checkpoint = self._plan(Pass.FORWARD, self.budget), START, None
        if self.resume is not None:
            if not isinstance(target, InFile):
                raise ValueError("resume= needs an out= that is in a file")
            checkpoint = Checkpoint(self.resume, self._request(sources, target))
            plan, position = checkpoint.load(plan)
            lse = checkpoint.lse(shape[:3], lse_dtype(dtype))
        else:
            lse = torch.empty(shape[:3], dtype=lse_dtype(dtype))
        prints = _fingerprints(sources)

        def finish(block: Block) -> None:
            nonlocal position
            if _fingerprints(sources) != prints:
                raise OSError("an input file was changed while it was read")
            position = block.end
            if checkpoint is not None:
                checkpoint.save(plan, position)

        with _reporting(self.progress, plan, position) as visited:
            while True:
                try:
                    streamed.attend(
                        plan, target, lse, start=position, visited=visited, finished=finish
                    )
                    break
                except torch.OutOfMemoryError as error:
                    plan = self._with_less(plan, error)
        if checkpoint is not None:
            lse = lse.clone()
            checkpoint.remove()
        return Partial(output, lse)

    def attend_and_keep(self, problem: Problem) -> Attended:
        """Compute the answer, and say how to differentiate it."""
        tensors = problem.query, problem.key, problem.value
        answer = self.attend(*(InMemory(tensor.detach()) for tensor in tensors))
        query, key, value = (_stand_in(tensor.shape, tensor.dtype) for tensor in tensors)
        without_tensors = replace(problem, query=query, key=key, value=value)
        run = replace(self, problem=without_tensors)
        return Attended(answer, (*tensors, *answer), run.differentiate)

    def differentiate(self, kept: Kept, grad_output: Tensor) -> Gradients:
        """Compute the gradients from what was kept."""
        *tensors, output, lse = (tensor.detach() for tensor in kept)
        streamed, budget = self._streamed(*map(InMemory, tensors)), self.budget
        while True:
            passes = Pass.QUERY_GRADIENTS, Pass.KEY_GRADIENTS
            plans = [self._plan(which, budget) for which in passes]
            try:
                return Gradients(*streamed.differentiate(plans, Partial(output, lse), grad_output))
            except torch.OutOfMemoryError as error:
                budget = self._with_less(plans[0], error).budget

    def _streamed(self, *sources: Source) -> Streamed:
        worker = Worker.of(self.problem, self.backend)
        query, key, value = sources
        samples = [
            torch.empty((1, 1, 1, source.shape[3]), dtype=source.dtype, device=self.device)
            for source in (query, key, value)
        ]
        worker.choose_backend(samples[0], samples[1], samples[2])  # or say why not
        return Streamed(query, key, value, worker, self.device)

    def _plan(self, which: Pass, budget: int, heads_at_once: int | None = None) -> StreamPlan:
        problem = self.problem
        return make_stream_plan(
            problem.query.shape[2],
            problem.key.shape[2],
            problem.shape,
            budget=budget,
            is_causal=problem.is_causal,
            pattern=problem.bound_pattern,
            rates=GPU if self.device.type == "cuda" else CPU,
            which=which,
            heads_at_once=heads_at_once,
        )

    def _with_less(self, plan: StreamPlan, error: Exception) -> StreamPlan:
        """Return a plan for half the memory, after an allocation has failed; or raise ``error``."""
        budget = min(plan.budget, plan.peak_bytes) // 2
        if budget * _LEAST_SHARE < self.budget:
            raise error
        torch.cuda.empty_cache()
        return self._plan(plan.which, budget, plan.heads_at_once)

    def _request(self, sources: tuple[Source, ...], target: InFile) -> dict[str, Any]:
        """Say what a checkpoint is of, in types that JSON has."""
        problem = self.problem
        return {
            "shapes": [list(source.shape) for source in sources],
            "dtype": str(problem.query.dtype),
            "device": self.device.type,
            "backend": self.backend,
            "is_causal": problem.is_causal,
            "pattern": repr(problem.pattern),
            "scale": problem.scale,
            "dropout": repr(problem.dropout),
            "inputs": _fingerprints(sources),
            "output": [str(target.path.resolve()), target.offset],
        }


def _verify(problem: Problem, sources: Sequence[Source], answer: Partial) -> None:
    """Recompute sampled rows, a key head at a time; see :func:`cqs.verify.verify_rows`."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    for batch, kv_head in product(*map(range, problem.key.shape[:2])):
        heads = range(kv_head * group_size, (kv_head + 1) * group_size)
        query = _read(sources[0], batch, heads)
        key, value = (_read(source, batch, range(kv_head, kv_head + 1)) for source in sources[1:])
        part = replace(
            problem,
            query=query,
            key=key,
            value=value,
            dropout=problem.dropout and problem.dropout.moved(batch, heads.start),
        )
        output = _read(as_source("out", answer.output), batch, heads)
        lse = answer.lse[batch : batch + 1, heads.start : heads.stop]
        try:
            verify_rows(part, Partial(output, lse))
        except VerificationError as error:
            error.add_note(f"batch and head counted from {batch} and {heads.start}")
            raise


def _read(source: Source, batch: int, heads: range) -> Tensor:
    _, _, tokens, columns = source.shape
    found = torch.empty((1, len(heads), tokens, columns), dtype=source.dtype)
    for into, head in zip(found[0], heads, strict=True):
        source.read(batch, head, range(tokens), into)
    return found


def _stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory that has a shape and dtype."""
    return torch.empty((1, 1, 1, 1), dtype=dtype).expand(shape)


def _choose_device(device: "torch.device | str | None") -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device must be the CPU or a GPU, got {chosen}")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _fingerprints(sources: tuple[Source, ...]) -> list[Any]:
    return [list(source.fingerprint) if isinstance(source, InFile) else None for source in sources]


@contextmanager
def _reporting(
    progress: Progress, plan: StreamPlan, start: Position
) -> Iterator[Callable[[Visit], None]]:
    """Give what is to be called after each visit."""
    total = plan.live_pairs * plan.num_groups
    done = 0
    for block in plan.blocks():
        if block.end > start:
            break
        done += plan.count(block.tokens, range(plan.num_streamed))
    bar = tqdm(
        total=total, initial=done, unit="pair", unit_scale=True, disable=progress is not True
    )

    def visited(visit: Visit) -> None:
        nonlocal done
        if visit.tokens is None:
            return
        count = plan.count(visit.block.tokens, visit.tokens)
        done += count
        bar.update(count)
        if callable(progress):
            progress(done, total)

    with bar:
        yield visited
