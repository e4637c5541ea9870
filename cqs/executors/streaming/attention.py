"""Attention within a memory budget."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cqs.arguments import with_advice
from cqs.executors.autograd import Attended, Kept, attend_differentiably
from cqs.executors.streaming.budget import parse_budget
from cqs.executors.streaming.checkpoint import Checkpoint, WorkingDirectory
from cqs.executors.streaming.plan import (
    CPU,
    GPU,
    START,
    HeldBlock,
    Pass,
    Position,
    StreamPlan,
    Visit,
    make_stream_plan,
)
from cqs.executors.streaming.reductions import Streamed
from cqs.executors.streaming.sources import (
    InFile,
    InMemory,
    Source,
    Target,
    as_source,
    as_target,
    share_files,
)
from cqs.executors.verify import VerificationError, verify_rows
from cqs.partial import AttentionOutput, Gradients, Partial, lse_dtype
from cqs.patterns import Pattern, causal, per_head, sliding_window
from cqs.problem import Problem, check_problem
from cqs.uncompiled import uncompiled
from cqs.worker import CallBackend, Worker
from cqs.worker.backends import BACKENDS, check_backend_name, choose_backend

_NAMES = ("query", "key", "value")
_LEAST_SHARE = 16
"""After an out-of-memory error the budget is halved, down to ``1 / _LEAST_SHARE`` of it."""

Progress = bool | Callable[[int, int], None]
"""Whether to draw a progress bar, or a function of live pairs done and in total."""


@uncompiled
@with_advice
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    memory_budget: int | str = "auto",
    device: "torch.device | str | None" = None,
    out: Any = None,
    resume: "str | os.PathLike[str] | WorkingDirectory | None" = None,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    verify: bool = False,
    progress: bool | Callable[[int, int], None] = False,
) -> Tensor | AttentionOutput:
    """Compute exact attention within a memory budget: tensors are read and written in parts.

    The result equals that of :func:`cqs.attention` up to rounding. Autograd computes first
    derivatives of the output; it treats the LSE as a constant.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``; float64, float32, bfloat16 or float16: a
            CPU tensor, a NumPy array, a memory map, an :class:`InFile` or an :class:`OnDemand`. A
            tensor in memory with a batch of 1 is broadcast.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``, of the same types and in the dtype of
            ``query``. ``num_heads`` must be a multiple of ``num_kv_heads``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``, of the same types and in the dtype
            of ``query``.
        memory_budget: Most bytes of memory of ``device`` that the call may hold: an integer,
            ``"8GiB"`` or ``"auto"``, 90 % of the free memory of a GPU or 50 % of that of the host.
        device: The device that computes; ``None`` means a GPU if there is one.
        out: Destination of the output: a CPU tensor, a NumPy array or an :class:`InFile`; ``None``
            allocates a CPU tensor. It must not overlap the inputs or itself, in memory or in a
            file. Inputs must not require gradients.
        resume: Path of a new or empty directory for working files, which a successful call removes.
            After an error it stays, and the same call continues from it. Requires an ``out`` in a
            file that holds no input.
        is_causal: Whether query i attends only to keys up to ``i + seqlen_kv - seqlen_q``.
        pattern: Sparse pattern of :mod:`cqs.patterns`, or ``None``.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        dropout_p: Probability in [0, 1) that a pair is dropped after the softmax. The dropout mask
            equals that of :func:`cqs.attention` with the same seed.
        seed: Random seed of the dropout mask, in [0, 2^63). ``None`` draws one from PyTorch's CPU
            generator for each call.
        backend: Name of the kernels, as in :func:`cqs.attention`.
        return_lse: Whether to return the log-sum-exp as well.
        verify: Whether to recompute sampled rows in float64 and raise an error if they deviate.
        progress: True draws a progress bar. A function is called as ``progress(pairs_done,
            pairs_total)``, live pairs of all heads.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of ``query`` on the
        CPU, or ``out``. With ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32
        (float64 for float64 inputs), on the CPU.

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes or options do not fit together; the memory budget is too small
            for a tile; a file is too short; or working files are damaged or belong to another
            computation.
        OSError: A file cannot be read or written, or changes during the call; the disk is full; or
            another process uses the ``resume`` directory.
        NotImplementedError: No backend, or not the named one, supports the call.
        torch.OutOfMemoryError: The device has less than a sixteenth of the memory budget.
        cqs.VerificationError: ``verify`` found a row with an error larger than rounding explains.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 1000, 16) for _ in range(3))
        >>> output = attention(q, k, v, is_causal=True, memory_budget="1MiB", device="cpu")
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(output, dense, atol=1e-5)
        True
    """
    check_backend_name(backend)
    tensors = (query, key, value)
    sources: Sequence[Source] = tuple(map(as_source, _NAMES, tensors))
    problem = check_problem(
        *map(_as_tensor, tensors, sources),
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
    )
    sources = tuple(map(_of_shape, _NAMES, sources, (problem.query, problem.key, problem.value)))
    where = _choose_device(device)
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors
    )
    if needs_grad and (out is not None or resume is not None):
        raise ValueError(
            "query, key and value must not require gradients with out= or resume=: detach them"
        )
    if needs_grad and not all(isinstance(source, InMemory) for source in sources):
        raise ValueError(
            "query, key and value must all be in memory if one requires gradients: load the "
            "others, or detach all"
        )
    with ExitStack() as stack:
        if resume is None or isinstance(resume, WorkingDirectory):  # entered by the caller
            directory = resume
        else:
            directory = stack.enter_context(WorkingDirectory(resume))
        with closing(_Reporter(progress, _num_pairs(problem))) as reporter:
            name = _choose_backend(problem, where, backend)
            run = _Run(where, parse_budget(memory_budget, where), name, reporter)
            if needs_grad:
                answer = attend_differentiably(problem, run.attend_and_keep)
            else:
                answer = run.attend(problem, sources, out, directory)
        if verify:
            try:
                _verify(problem, sources, answer)
            except VerificationError:
                if directory is not None:
                    directory.forget()
                raise
    return answer.to_result(return_lse)


@dataclass(frozen=True)
class _Run:
    """The execution of one call.

    Tensors that are not in memory are represented in the problem by expanded tensors without
    memory. The parts of the problem, each with a single pattern, are computed one after another.
    """

    device: torch.device
    """The device that computes."""
    budget: int
    """Memory budget in bytes."""
    backend: str
    """Backend of all visits; plans depend on its memory use."""
    reporter: "_Reporter"

    def attend(
        self,
        problem: Problem,
        sources: Sequence[Source],
        out: Any = None,
        directory: WorkingDirectory | None = None,
    ) -> Partial:
        """Compute output and LSE, into ``out`` if given, and resume from ``directory`` if given."""
        parts = [self._in_strips(part) for _, part in problem.parts()]
        shape = (*problem.query.shape[:3], problem.value.shape[3])
        dtype = problem.query.dtype
        output = torch.empty(shape, dtype=dtype, device="cpu") if out is None else out
        target = InMemory(output) if out is None else as_target(out, shape, dtype, sources)
        # A file that the output is written to changes during the run.
        watched = [source for source in sources if not share_files(target, source)]
        # Taken before the checkpoint is loaded, which takes long enough for an input to change.
        prints = _fingerprints(watched)
        plans = [self._plan(part, Pass.FORWARD, self.budget) for part in parts]
        first, start, checkpoint = 0, START, None
        lse: InMemory | InFile
        if directory is not None:
            if not isinstance(target, InFile) or len(watched) < len(sources):
                raise ValueError(
                    "out must be in a file of its own if resume= is given, not in memory or in the "
                    "file of an input"
                )
            checkpoint = Checkpoint(directory, self._request(problem, prints, target), target)
            plans, first, start = checkpoint.load(plans)
            lse = checkpoint.lse
        else:
            lse = InMemory(torch.empty((*shape[:3], 1), dtype=lse_dtype(dtype), device="cpu"))

        def finish(
            number: int, where: tuple[slice, slice], plan: StreamPlan, block: HeldBlock
        ) -> None:
            if _fingerprints(watched) != prints:
                raise OSError("an input file was changed while it was read: start again")
            if checkpoint is not None:
                plans[number] = plan
                batch, head = (each.start or 0 for each in where)
                heads = range(head + block.heads.start, head + block.heads.stop)
                place = batch + block.batch, heads, block.tokens
                checkpoint.add(plans, number, block.end, place)

        query, key, value = sources
        with ExitStack() as stack:
            if checkpoint is not None:
                stack.callback(checkpoint.save)
            for number, (of_queries, of_keys) in enumerate(problem.cuts()):
                if number >= first:
                    of_part = query.part(*of_queries), key.part(*of_keys), value.part(*of_keys)
                    self._attend_part(
                        parts[number],
                        Streamed(*of_part, Worker.of(parts[number], self.backend), self.device),
                        plans[number],
                        target.part(*of_queries),
                        lse.part(*of_queries),
                        start if number == first else START,
                        partial(finish, number, of_queries),
                    )
                self.reporter.end_part(plans[number])
        found = lse.tensor if isinstance(lse, InMemory) else _read(lse, *map(range, shape[:2]))
        return Partial(output, found.squeeze(-1))

    def attend_and_keep(self, problem: Problem) -> Attended:
        """Compute output and LSE, and return them with their backward pass."""
        tensors = problem.query, problem.key, problem.value
        answer = self.attend(problem, [InMemory(tensor.detach()) for tensor in tensors])
        query, key, value = (_stand_in(tensor.shape, tensor.dtype) for tensor in tensors)
        without_tensors = replace(problem, query=query, key=key, value=value)
        return Attended(answer, (*tensors, *answer), partial(self._differentiate, without_tensors))

    def _attend_part(
        self,
        problem: Problem,
        streamed: Streamed,
        plan: StreamPlan,
        target: Target,
        lse: Target,
        position: Position,
        finish: Callable[[StreamPlan, HeldBlock], None],
    ) -> None:
        """Compute one part; after an out-of-memory error continue with a smaller plan."""

        def finished(block: HeldBlock) -> None:
            nonlocal position
            finish(plan, block)
            position = block.end

        while True:
            self.reporter.begin(plan, position)
            visited = partial(self.reporter.advance, plan)
            try:
                streamed.attend(
                    plan, target, lse, start=position, visited=visited, finished=finished
                )
                return
            except RuntimeError as error:
                plan = self._with_less(problem, plan, error)

    def _differentiate(self, problem: Problem, kept: Kept, grad_output: Tensor) -> Gradients:
        """Compute the gradients from the tensors that the forward pass saved."""
        *tensors, output, lse = (tensor.detach() for tensor in kept)
        query, key, value = map(InMemory, tensors)
        problem, budget = self._in_strips(problem), self.budget
        streamed = Streamed(query, key, value, Worker.of(problem, self.backend), self.device)
        while True:
            passes = Pass.QUERY_GRADIENTS, Pass.KEY_GRADIENTS
            plans = [self._plan(problem, which, budget) for which in passes]
            try:
                return Gradients(*streamed.differentiate(plans, Partial(output, lse), grad_output))
            except RuntimeError as error:
                budget = self._with_less(problem, plans[0], error).budget

    def _in_strips(self, problem: Problem) -> Problem:
        """Give dense problems of the ``reference`` backend an equivalent pattern.

        This backend stores all scores of a call, and calls for a pattern are small.
        """
        if self.backend != "reference" or problem.pattern is not None:
            return problem
        pattern = causal() if problem.is_causal else sliding_window(None, None)
        return replace(problem, is_causal=False, pattern=pattern)

    def _plan(
        self, problem: Problem, which: Pass, budget: int, heads_at_once: int | None = None
    ) -> StreamPlan:
        on_gpu = self.device.type == "cuda"
        return make_stream_plan(
            problem.query.shape[2],
            problem.key.shape[2],
            problem.shape,
            budget=budget,
            is_causal=problem.is_causal,
            pattern=problem.bound_pattern,
            rates=GPU if on_gpu else CPU,
            which=which,
            heads_at_once=heads_at_once,
            has_single_calls=on_gpu and isinstance(BACKENDS[self.backend], CallBackend),
        )

    def _with_less(self, problem: Problem, plan: StreamPlan, error: Exception) -> StreamPlan:
        """Return a plan for half the memory after an out-of-memory error, else raise ``error``."""
        budget = min(plan.budget, plan.peak_bytes) // 2
        if not _is_shortage(error) or budget * _LEAST_SHARE < self.budget:
            raise error
        torch.cuda.empty_cache()
        try:
            return self._plan(problem, plan.which, budget, plan.heads_at_once)
        except ValueError:  # the budget is too small for a tile
            raise error from None

    def _request(
        self, problem: Problem, fingerprints: Sequence[Any], target: InFile
    ) -> dict[str, Any]:
        """Return the identity of the computation for its checkpoint, in JSON types."""
        return {
            "format": 3,
            "shapes": [list(each.shape) for each in (problem.query, problem.key, problem.value)],
            "dtype": str(problem.query.dtype),
            "device": self.device.type,
            "backend": self.backend,
            "is_causal": problem.is_causal,
            "pattern": repr(problem.pattern),
            "scale": problem.scale,
            "dropout": repr(problem.dropout),
            "inputs": fingerprints,
            "output": [str(target.path.resolve()), target.offset],
        }


def _choose_backend(problem: Problem, device: torch.device, backend: str | None) -> str:
    query, key, value = (
        torch.empty((1, 1, 2, tensor.shape[3]), dtype=tensor.dtype, device=device)
        for tensor in (problem.query, problem.key, problem.value)
    )
    return choose_backend(
        query,
        key,
        value,
        backend,
        has_dropout=problem.dropout is not None,
        has_pattern=problem.pattern is not None,
    ).name


def _verify(problem: Problem, sources: Sequence[Source], answer: Partial) -> None:
    """Verify sampled rows, one KV head in memory at a time; see :func:`verify_rows`."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    for batch, kv_head in product(*map(range, problem.key.shape[:2])):
        heads = range(kv_head * group_size, (kv_head + 1) * group_size)
        batches = range(batch, batch + 1)
        query = _read(sources[0], batches, heads)
        key, value = (_read(source, batches, range(kv_head, kv_head + 1)) for source in sources[1:])
        part = replace(
            problem,
            query=query,
            key=key,
            value=value,
            dropout=problem.dropout and problem.dropout.moved(batch, heads.start),
            pattern=problem.pattern
            and per_head([[problem.pattern.head(batch, head) for head in heads]]),
        )
        output = _read(as_source("out", answer.output), batches, heads)
        lse = answer.lse[batch : batch + 1, heads.start : heads.stop]
        try:
            verify_rows(part, Partial(output, lse))
        except VerificationError as error:
            error.add_note(f"batch and head counted from {batch} and {heads.start}")
            raise


def _read(source: Source, batches: range, heads: range) -> Tensor:
    _, _, tokens, columns = source.shape
    shape = len(batches), len(heads), tokens, columns
    found = torch.empty(shape, dtype=source.dtype, device="cpu")
    for into, (batch, head) in zip(found.flatten(0, 1), product(batches, heads), strict=True):
        source.read(batch, head, range(tokens), into)
    return found


def _as_tensor(argument: Any, source: Source) -> Tensor:
    """Return the tensor of an argument, or a stand-in without memory if it is not in memory."""
    if isinstance(argument, Tensor):
        return argument
    if isinstance(source, InMemory):
        return source.tensor
    return _stand_in(source.shape, source.dtype)


def _of_shape(name: str, source: Source, tensor: Tensor) -> Source:
    """Return a source of the shape of a checked tensor, whose batch may have been expanded."""
    if isinstance(source, InMemory):
        return InMemory(tensor.detach())
    if source.shape != tuple(tensor.shape):
        raise ValueError(
            f"{name} must have shape {list(tensor.shape)} if it is not in memory, "
            f"got {list(source.shape)}"
        )
    return source


def _stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an expanded tensor of one element, on the CPU."""
    return torch.empty((1, 1, 1, 1), dtype=dtype, device="cpu").expand(shape)


def _choose_device(device: "torch.device | str | None") -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be the CPU or a GPU, got {device!r}: {error}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device must be the CPU or a GPU, got {chosen}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError(f"device must be the CPU without a GPU, got {chosen}")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _is_shortage(error: Exception) -> bool:
    """Return whether an allocation failed; PyTorch has no error type for that on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _fingerprints(sources: Sequence[Source]) -> list[Any]:
    return [list(source.fingerprint) if isinstance(source, InFile) else None for source in sources]


def _num_pairs(problem: Problem) -> int:
    """Return the number of live pairs of all query heads."""
    lengths = problem.query.shape[2], problem.key.shape[2]
    total = 0
    for _, part in problem.parts():
        everything = causal() if part.is_causal else sliding_window(None, None)
        bound = (part.pattern or everything).bind(*lengths)
        total += bound.num_pairs * part.query.shape[0] * part.query.shape[1]
    return total


class _Reporter:
    """Reports the live pairs that are done, over all query heads."""

    def __init__(self, progress: Progress, total: int):
        if not isinstance(progress, bool) and not callable(progress):
            raise TypeError(f"progress must be a bool or a function, got {progress!r}")
        self._bar = tqdm(total=total, unit="pair", unit_scale=True, disable=progress is not True)
        self._callback = progress if callable(progress) else None
        self._total = total
        self._before = self._done = 0

    def begin(self, plan: StreamPlan, position: Position) -> None:
        """Set progress to a position of a part; may go back, because a block is restarted."""
        self._move(self._before + plan.pairs_until(position))

    def advance(self, plan: StreamPlan, visit: Visit) -> None:
        """Count the live pairs of a visit and call the progress function."""
        if visit.tokens is None:
            return
        of_head = plan.count(visit.block.tokens, visit.tokens)
        self._move(self._done + of_head * len(visit.block.heads))
        if self._callback is not None:
            self._callback(self._done, self._total)

    def end_part(self, plan: StreamPlan) -> None:
        """Count all live pairs of a part as done."""
        self._before += plan.pairs_until(Position(plan.num_groups, 0))

    def close(self) -> None:
        """Close the progress bar."""
        self._bar.close()

    def _move(self, done: int) -> None:
        self._bar.update(done - self._done)
        self._done = done
