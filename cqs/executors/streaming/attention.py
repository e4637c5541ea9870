"""Attention within a memory budget."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from cqs.arguments import as_bool, with_advice
from cqs.executors.contract import attend
from cqs.executors.streaming.budget import parse_budget
from cqs.executors.streaming.checkpoint import Checkpoint, WorkingDirectory
from cqs.executors.streaming.executor import StreamingExecutor
from cqs.executors.streaming.sources import InFile, Source, as_source, as_target
from cqs.partial import AttentionOutput, Partial, lse_dtype
from cqs.patterns import causal, sliding_window
from cqs.problem import Problem, check_num_tasks, check_problem
from cqs.problem.options import AttentionOptions, problem_options
from cqs.problem.scores import take_apart
from cqs.problem.tensors import autocast
from cqs.uncompiled import uncompiled
from cqs.worker.backends import choose_backend

_NAMES = ("query", "key", "value")


class Resumable(NamedTuple):
    """An output in a file whose computation continues after an error.

    A successful call removes the directory. After an error it stays, and the same call continues.
    """

    output: Any
    """Destination of the output: a memory map or an :class:`InFile`."""
    directory: str | os.PathLike[str] | WorkingDirectory
    """Path of a directory for working files: a new or empty one, or that of the earlier call."""


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
    progress: bool | Callable[[int, int], None] = False,
    **options: Unpack[AttentionOptions],
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
            allocates a CPU tensor. It must not overlap itself, lie between the bytes of an input,
            or be in the file of an input. Inputs must not require gradients. With a
            :class:`Resumable` the same call continues after an error.
        progress: True draws a progress bar. A function is called as ``progress(pairs_done,
            pairs_total)``, live pairs of all heads.
        options: The options of :func:`cqs.attention`: ``is_causal``, ``pattern``, ``scale``,
            ``dropout_p``, ``seed``, ``scores``, ``backend``, ``return_lse`` and ``verify``. Tensors
            of the scores are on the CPU, those of a score function on ``device``.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]``, in the dtype of ``query`` on the
        CPU, or ``out``. With ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``, float32
        (float64 for float64 inputs), on the CPU.

    Raises:
        TypeError: An argument has the wrong type, or the tensors an unsupported dtype.
        ValueError: Shapes, dtypes or options do not fit together; the memory budget is too small
            for a tile, of the backward pass too if gradients are required; a file is too short; or
            working files are damaged or belong to another computation.
        OSError: A file cannot be read or written, or changes during the call; the disk is full; or
            another process uses the directory of a :class:`Resumable`.
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
    sources: list[Any] = list(autocast(*map(as_source, _NAMES, (query, key, value))))
    problem = check_problem(*map(_stand_in, sources), **problem_options(options))
    checked = problem.query, problem.key, problem.value
    needs_grad = problem.requires_grad
    if needs_grad and any(isinstance(source, Source) for source in sources):
        raise ValueError(
            "query, key and value must all be in memory if one requires gradients: load the "
            "others, or detach all"
        )
    if needs_grad and out is not None:
        raise ValueError(
            "query, key, value and scores must not require gradients with out=: detach their "
            "tensors"
        )
    directory: Any = None
    if isinstance(out, Resumable):
        out, directory = out
        if directory is None:
            raise TypeError("directory must be the path of a directory, got None")
        if problem.is_reproducible:
            raise ValueError("reproducible must be False with a Resumable, got True")
        if problem.terms is not None and problem.terms.score_mod is not None:
            raise ValueError(
                "scores.score_mod must be None with a Resumable, got a function: another process "
                "cannot tell whether its function is the same"
            )
    features = problem.dropout, problem.pattern, problem.terms
    check_num_tasks(problem)
    where, name = choose_device_and_backend(checked, device, options.get("backend"), *features)
    budget = parse_budget(memory_budget, where)
    sources = list(map(_shaped_source, _NAMES, sources, checked))
    problem = replace(problem, query=sources[0], key=sources[1], value=sources[2])
    has_strips = name == "reference" and not problem.is_reproducible
    in_strips = _in_strips(problem) if has_strips else problem
    executor = StreamingExecutor(where, budget, name, sources)
    return_lse = as_bool("return_lse", options.get("return_lse", False))
    verify = as_bool("verify", options.get("verify", False))
    call = executor, in_strips, executor.make_plan
    compute = partial(attend, *call, verify=verify, progress=progress)
    if needs_grad:
        for _, part in in_strips.parts():  # before the forward pass
            if part.is_reproducible:
                executor.unit_stream(part, with_gradients=True)
            else:
                executor.plan_gradients(executor.make_plan(part))
        return compute().to_result(return_lse)
    shape, dtype = (*checked[0].shape[:3], checked[2].shape[3]), checked[0].dtype
    out = torch.empty(shape, dtype=dtype, device="cpu") if out is None else out
    score_tensors = [term for term in take_apart(options.get("scores"))[0] if term is not None]
    target: Any = as_target(out, shape, dtype, [*sources, *score_tensors])
    if directory is not None and isinstance(target, Tensor):
        raise ValueError("out must be in a file to be resumed, got a tensor in memory")
    lse = torch.empty(shape[:3], dtype=lse_dtype(dtype), device="cpu")
    into = Partial(target, lse)
    with ExitStack() as stack:
        if directory is not None:
            if not isinstance(directory, WorkingDirectory):  # else entered by the caller
                directory = stack.enter_context(WorkingDirectory(directory))
            request = _identify(problem, executor, target)
            plans = [executor.make_plan(part) for _, part in in_strips.parts()]
            executor.checkpoint = Checkpoint(directory, request, target, lse, plans)
            stack.push(executor.checkpoint.close)
        compute(into=into)
    return Partial(out, lse).to_result(return_lse)


def _stand_in(source: Tensor | Source) -> Tensor:
    """Return a tensor, or for a source one of its shape and dtype without memory."""
    if isinstance(source, Tensor):
        return source
    return torch.empty(1, dtype=source.dtype, device="cpu").expand(source.shape)


def _shaped_source(name: str, source: Tensor | Source, checked: Tensor) -> Tensor | Source:
    """Return the checked tensor, whose batch may have been expanded, or the source of its shape."""
    if isinstance(source, Tensor):
        return checked
    if source.shape != tuple(checked.shape):
        raise ValueError(
            f"{name} must have shape {list(checked.shape)} if it is not in memory, "
            f"got {list(source.shape)}"
        )
    return source


def choose_device_and_backend(
    tensors: Sequence[Source | Tensor], device: torch.device | str | None, *options: Any
) -> tuple[torch.device, str]:
    """Return the device that computes tasks, and the name of the backend.

    Args:
        tensors: Query, key and value, in memory or in files.
        device: The device, or ``None``; see :func:`attention`.
        options: The options of :func:`cqs.worker.choose_backend`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be the CPU or a GPU, got {device!r}: {error}") from None
    if chosen.type != "cpu" and (chosen.type != "cuda" or not torch.cuda.is_available()):
        raise NotImplementedError(f"device must be the CPU or a GPU in this machine, got {chosen}")
    query, key, value = (
        torch.empty((1, 1, 2, like.shape[3]), dtype=like.dtype, device=chosen) for like in tensors
    )
    return query.device, choose_backend(query, key, value, *options).name


def _in_strips(problem: Problem) -> Problem:
    """Give a dense problem of the ``reference`` backend an equivalent pattern.

    This backend stores all scores of a call, and calls for a pattern are small.
    """
    if problem.pattern is not None:
        return problem
    pattern = causal() if problem.is_causal else sliding_window(None, None)
    return replace(problem, is_causal=False, pattern=pattern)


def _identify(problem: Problem, executor: StreamingExecutor, target: InFile) -> dict[str, Any]:
    """Return the identity of the computation for its checkpoint, in JSON types."""
    return {
        "shapes": [list(tensor.shape) for tensor in (problem.query, problem.key, problem.value)],
        "dtype": str(problem.query.dtype),
        "device": executor.device.type,
        "backend": executor.backend,
        "is_causal": problem.is_causal,
        "pattern": repr(problem.pattern),
        "scale": problem.scale,
        "dropout": repr(problem.dropout),
        **({} if problem.sinks is None else {"sinks": problem.sinks.tolist()}),
        **({} if problem.terms is None else problem.terms.identity()),
        "inputs": executor.fingerprints,
        "output": [str(target.path.resolve()), target.offset],
    }
