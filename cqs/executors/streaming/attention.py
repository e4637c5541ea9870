"""Attention within a memory budget."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cqs.arguments import with_advice
from cqs.executors.autograd import attend_differentiably, keep_operands
from cqs.executors.contract import Progress, count_pairs
from cqs.executors.streaming.budget import parse_budget
from cqs.executors.streaming.checkpoint import Checkpoint, WorkingDirectory
from cqs.executors.streaming.engine import Side, stream
from cqs.executors.streaming.plan import (
    CPU,
    GPU,
    START,
    HeldBlock,
    Pass,
    Position,
    StreamPlan,
    make_stream_plan,
)
from cqs.executors.streaming.sources import (
    InFile,
    InMemory,
    Source,
    Target,
    as_source,
    as_target,
    read_head,
    share_files,
)
from cqs.executors.streaming.transfers import RowsOfHeads
from cqs.executors.verify import VerificationError, verify_heads
from cqs.partial import AttentionOutput, Gradients, Partial, lse_dtype
from cqs.patterns import Pattern, causal, sliding_window
from cqs.problem import Problem, check_problem
from cqs.uncompiled import uncompiled
from cqs.worker import CallBackend, Worker
from cqs.worker.backends import BACKENDS, check_backend_name, choose_backend

_NAMES = ("query", "key", "value")
_LEAST_SHARE = 16
"""After an out-of-memory error the budget is halved, down to ``1 / _LEAST_SHARE`` of it."""


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
    sources: tuple[Source, ...] = tuple(map(as_source, _NAMES, tensors))
    problem = check_problem(
        *map(_as_tensor, tensors, sources),
        is_causal=is_causal,
        pattern=pattern,
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
    )
    checked = problem.query, problem.key, problem.value
    sources = tuple(map(_of_shape, _NAMES, sources, checked))
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in checked)
    if needs_grad and not all(isinstance(source, InMemory) for source in sources):
        raise ValueError(
            "query, key and value must all be in memory if one requires gradients: load the "
            "others, or detach all"
        )
    if needs_grad and not out is resume is None:
        raise ValueError(
            "query, key and value must not require gradients with out= or resume=: detach them"
        )
    where = _choose_device(device)
    name = _choose_backend(problem, where, backend)
    budget = parse_budget(memory_budget, where)
    with ExitStack() as stack:
        counted = count_pairs(problem, lambda part: part.make_plan(1), progress)
        call = _Call(where, budget, name, stack.enter_context(counted))
        directory: WorkingDirectory | None = None
        if needs_grad:
            answer = attend_differentiably(
                problem, partial(keep_operands, call.attend, call.differentiate)
            )
            target: Target = InMemory(answer.output)
        else:
            shape = (*problem.query.shape[:3], problem.value.shape[3])
            dtype = problem.query.dtype
            out = torch.empty(shape, dtype=dtype, device="cpu") if out is None else out
            target = as_target(out, shape, dtype, sources, is_resumed=resume is not None)
            if isinstance(resume, WorkingDirectory):  # entered by the caller
                directory = resume
            elif resume is not None:
                directory = stack.enter_context(WorkingDirectory(resume))
            lse = call.attend_into(problem, sources, target, directory)
            answer = Partial(out, lse)
        if verify:
            heads = [partial(read_head, source) for source in (*sources, target)]
            try:
                verify_heads(problem, [*heads, answer.lse.__getitem__])
            except VerificationError:
                if directory is not None:
                    directory.forget()
                raise
    return answer.to_result(return_lse)


@dataclass(frozen=True)
class _Call:
    """The execution of one call.

    Tensors that are not in memory are represented in the problem by expanded tensors without
    memory. The parts of the problem, each with a single pattern, are computed one after another.
    """

    device: torch.device
    """The device that computes."""
    budget: int
    """Memory budget in bytes."""
    backend: str
    """Backend of all chunks; plans depend on its memory use."""
    progress: Progress | None
    """Counts the live pairs that are done, if anybody asks."""

    def attend(self, problem: Problem) -> Partial:
        """Compute output and LSE of a problem whose tensors are in memory."""
        query, _, value = sources = _sources_of(problem)
        output = query.tensor.new_empty((*query.shape[:3], value.shape[3]))
        return Partial(output, self.attend_into(problem, sources, InMemory(output)))

    def attend_into(
        self,
        problem: Problem,
        sources: Sequence[Source],
        target: Target,
        directory: WorkingDirectory | None = None,
    ) -> Tensor:
        """Write the output to ``target`` and return the LSE; resume from ``directory`` if given."""
        parts = [self._in_strips(part) for _, part in problem.parts()]
        # A file that the output is written to changes during the run.
        watched = [source for source in sources if not share_files(target, source)]
        # Taken before the checkpoint is loaded, which takes long enough for an input to change.
        prints = _fingerprints(watched)
        plans = [self._plan(part, Pass.FORWARD, self.budget) for part in parts]
        lse = problem.query.new_empty(problem.query.shape[:3], dtype=lse_dtype(problem.query.dtype))
        targets: list[Target] = [target, InMemory(lse.unsqueeze(-1))]
        first, start, checkpoint = 0, START, None
        if isinstance(target, InFile) and directory is not None:
            checkpoint = Checkpoint(directory, self._request(problem, prints, target), target)
            plans, first, start = checkpoint.load(plans)
            targets[1] = checkpoint.lse

        def finish(number: int, end: Position, place: RowsOfHeads) -> None:
            if _fingerprints(watched) != prints:
                raise OSError("an input file was changed while it was read: start again")
            if checkpoint is not None:
                checkpoint.add(plans, number, end, place)

        query, key, value = sources
        with ExitStack() as stack:
            if checkpoint is not None:
                stack.callback(checkpoint.save)
            for number, ((batches, heads), (_, kv_heads)) in enumerate(problem.cuts()):
                begin = START if number > first else start if number == first else plans[number].end
                queries = Side((query,), False, batches.start or 0, heads.start or 0)
                keys = Side((key, value), True, batches.start or 0, kv_heads.start or 0)
                self._attend_part(
                    parts[number], plans, number, begin, queries, keys, targets, finish
                )
        if checkpoint is not None:
            for batch, head in product(*map(range, lse.shape[:2])):
                lse[batch, head] = read_head(checkpoint.lse, (batch, head)).squeeze(-1)
        return lse

    def _attend_part(
        self,
        problem: Problem,
        plans: list[StreamPlan],
        number: int,
        position: Position,
        queries: Side,
        keys: Side,
        targets: Sequence[Target],
        finish: Callable[[int, Position, RowsOfHeads], None],
    ) -> None:
        """Compute a part by ``plans[number]``, and by a smaller one after an out-of-memory error.

        Args:
            problem: The part.
            plans: The plan of each part; that of this part may be replaced.
            number: Index of the part.
            position: The position up to which results are final already.
            queries: The query, of the whole problem.
            keys: Key and value of the whole problem.
            targets: Destinations of output and LSE of the whole problem.
            finish: Called with ``number``, position and place after each block.
        """
        before = self.progress.done if self.progress is not None else 0

        def visited(block: HeldBlock, tokens: range) -> None:
            if self.progress is not None:
                pairs = plans[number].count(block.tokens, tokens)
                self.progress.advance(pairs * len(block.heads))

        def finished(block: HeldBlock, place: RowsOfHeads) -> None:
            nonlocal position
            finish(number, block.end, place)
            position = block.end

        while True:
            plan = plans[number]
            if self.progress is not None:
                self.progress.move(before + plan.pairs_until(position))
            try:
                stream(
                    plan,
                    self.device,
                    Worker.of(problem, self.backend),
                    queries,
                    keys,
                    targets,
                    start=position,
                    visited=visited,
                    finished=finished,
                )
                return
            except RuntimeError as error:
                plans[number] = self._with_less(problem, plan, error)

    def differentiate(self, problem: Problem, answer: Partial, grad_output: Tensor) -> Gradients:
        """Compute the gradients of a problem whose tensors are in memory."""
        query, key, value = _sources_of(problem)
        of_answer = (grad_output, answer.output, answer.lse.unsqueeze(-1))
        queries, keys = Side((query, *map(InMemory, of_answer)), False), Side((key, value), True)
        tensors = problem.query, problem.key, problem.value
        gradients = Gradients(*(tensor.new_empty(tensor.shape) for tensor in tensors))
        problem, budget = self._in_strips(problem), self.budget
        worker = Worker.of(problem, self.backend)
        while True:
            passes = Pass.QUERY_GRADIENTS, Pass.KEY_GRADIENTS
            plans = [self._plan(problem, which, budget) for which in passes]
            try:
                for plan in plans:
                    found = gradients[1:] if plan.holds_keys else gradients[:1]
                    targets = list(map(InMemory, found))
                    stream(plan, self.device, worker, queries, keys, targets)
                return gradients
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


def _sources_of(problem: Problem) -> list[InMemory]:
    tensors = problem.query, problem.key, problem.value
    return [InMemory(tensor.detach()) for tensor in tensors]


def _as_tensor(argument: Any, source: Source) -> Tensor:
    """Return the tensor of an argument, or a stand-in without memory if it is not in memory."""
    if isinstance(argument, Tensor):
        return argument
    if isinstance(source, InMemory):
        return source.tensor
    return torch.empty((1, 1, 1, 1), dtype=source.dtype, device="cpu").expand(source.shape)


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


def _choose_device(device: "torch.device | str | None") -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be the CPU or a GPU, got {device!r}: {error}") from None
    if chosen.type != "cpu" and (chosen.type != "cuda" or not torch.cuda.is_available()):
        raise NotImplementedError(f"device must be the CPU or a GPU in this machine, got {chosen}")
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _is_shortage(error: Exception) -> bool:
    """Return whether an allocation failed; PyTorch has no error type for that on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _fingerprints(sources: Sequence[Source]) -> list[Any]:
    return [list(source.fingerprint) if isinstance(source, InFile) else None for source in sources]
