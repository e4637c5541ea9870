"""The one call that most users need."""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cqs.advice import with_advice
from cqs.autograd import attend_differentiably, keeping_operands
from cqs.executors.local import run_local, run_local_backward
from cqs.patterns import Pattern
from cqs.problem import Problem, check_problem
from cqs.scheduler import Plan
from cqs.uncompiled import uncompiled
from cqs.verify import verify_rows
from cqs.worker.backends import check_backend_name

if TYPE_CHECKING:
    from cqs.executors.ray import Cluster


@uncompiled
@with_advice
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    pattern: Pattern | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    num_tasks: int | None = None,
    interest_set: Iterable[int] | None = None,
    backend: str | None = None,
    executor: "str | Cluster | None" = None,
    return_lse: bool = False,
    verify: bool = False,
    memory_budget: int | str | None = None,
    device: torch.device | str | None = None,
    out: Any = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention as ``num_tasks`` tasks that never talk to each other.

    The result is that of ``torch.nn.functional.scaled_dot_product_attention(query, key, value,
    is_causal=is_causal, scale=scale, enable_gqa=True)`` up to rounding, with two differences:
    causal attention of unequal lengths is aligned at the bottom right, and queries that see no key
    give 0 (lse -inf). Sums run in float32 (float64 for float64). Inputs are never written to.
    The output can be differentiated, once; the lse is a constant to autograd.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``; float64, float32, bfloat16 or float16,
            on the CPU or a GPU, of any strides. A batch of 1, of any of the three, is broadcast.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``; ``num_heads`` must be a multiple of
            ``num_kv_heads``, and consecutive query heads share one.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        is_causal: Query i sees the keys up to ``i + seqlen_kv - seqlen_q``.
        pattern: Which pairs attend, of :mod:`cqs.patterns`; with ``is_causal`` only those up to the
            diagonal. What it hides is not computed, and what no backend can hide is refused.
        scale: Factor on the scores; ``None`` means ``head_dim ** -0.5``.
        dropout_p: Chance, in [0, 1), that a probability is zeroed after the softmax; the rest is
            divided by ``1 - dropout_p``. Which pairs are dropped depends on seed, batch, head and
            the positions of query and key, not on how the work is cut or who does it.
        seed: For dropout; at least 0, less than 2^63. ``None`` draws one from PyTorch's CPU
            generator for each call.
        num_tasks: Number of tasks; ``None`` means one (local) or one per worker (Ray).
        interest_set: See :func:`cqs.make_plan`.
        backend: ``"cpu"``, ``"triton"``, ``"flash"``, ``"cudnn"`` or ``"reference"``; ``None``
            takes the best that can (:data:`cqs.worker.backends.WHY_NOT`). A named backend computes
            or explains, it never falls back.
        executor: ``None`` or ``"local"``: this process. A :class:`cqs.Cluster`: its workers.
            ``"ray"``: a private cluster for this call alone (it takes seconds to start).
        return_lse: Also return the natural log of the softmax denominators.
        verify: Recompute sampled rows in float64 and raise if they disagree.
        memory_budget: Bytes, ``"8GiB"`` or ``"auto"``: compute tensors that are on the CPU, or in
            files, on ``device`` without ever holding more there. Query, key and value may then
            also be NumPy arrays, memory-mapped or not, or of :mod:`cqs.streaming`; they are read
            as they are needed. In this process, with tasks of its own choice. The rest of the
            arguments is for this alone.
        device: Where to compute; ``None`` means a GPU if there is one.
        out: Where the output goes: a CPU tensor, NumPy array or :class:`cqs.streaming.InFile`;
            ``None`` makes a tensor. Records no gradients. It shares no byte, of memory or of a
            file, with the inputs, and its elements share none.
        resume: A new or empty directory for working files, which this call removes at the end.
            After an error it stays, and the same call goes on where it was. Anything else at this
            path is rejected unchanged. Needs an ``out`` in a file of its own.
        progress: True draws a progress bar with the time left; a function is called with (pairs
            done, pairs in all), of all heads.

    Returns:
        ``output``, ``[batch, num_heads, seqlen_q, value_dim]`` in the dtype and on the device of
        ``query``, or ``out``; with ``return_lse`` also ``lse``, ``[batch, num_heads, seqlen_q]``,
        float32 (float64 for float64).

    Raises:
        TypeError: for arguments of the wrong type and unsupported dtypes.
        ValueError: for shapes, dtypes, devices or values that do not fit, a memory budget that is
            too small for a tile, files that are cut short, and working files that are damaged or of
            another computation.
        OSError: if a file cannot be read or written, is changed meanwhile, the disk is full, or
            another process uses the directory of ``resume``.
        NotImplementedError: if the named backend cannot take the tensors, and for
            ``"ray"`` where Ray is not installed; the message says why.
        torch.OutOfMemoryError: if a GPU has too little memory; the message says what would fit.
        cqs.verify.VerificationError: if ``verify`` finds a wrong row.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> output = attention(q, k, v, is_causal=True, num_tasks=7)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(output, dense, atol=1e-5)
        True
    """
    problem_options: dict[str, Any] = {
        "is_causal": is_causal,
        "pattern": pattern,
        "scale": scale,
        "dropout_p": dropout_p,
        "seed": seed,
    }
    check_backend_name(backend)
    if memory_budget is not None:
        if not (num_tasks is interest_set is None and executor in (None, "local")):
            raise ValueError("a memory budget chooses tasks itself, and computes in this process")
        from cqs.streaming.run import attend_within

        answer = attend_within(
            query,
            key,
            value,
            memory_budget=memory_budget,
            device=device,
            out=out,
            resume=resume,
            progress=progress,
            backend=backend,
            verify=verify,
            **problem_options,
        )
        return (answer.output, answer.lse) if return_lse else answer.output
    if not (device is out is resume is None and progress is False):
        raise ValueError("device, out, resume and progress are for calls with a memory_budget")
    problem = check_problem(query, key, value, **problem_options)

    def make_plan(problem: Problem) -> Plan:
        return problem.make_plan(1 if num_tasks is None else num_tasks, interest_set)

    for _, part in problem.parts():
        make_plan(part)  # before Ray starts, whatever is wrong with the options
    if executor is None or executor == "local":
        attend = keeping_operands(
            lambda problem: run_local(problem, make_plan(problem), backend=backend),
            lambda problem, answer, grad_output: run_local_backward(
                problem, make_plan(problem), answer, grad_output, backend=backend
            ),
        )
        answer = attend_differentiably(problem, attend)
        if verify:
            verify_rows(problem, answer)
        return (answer.output, answer.lse) if return_lse else answer.output

    if isinstance(executor, str) and executor != "ray":
        raise ValueError(f"executor must be 'local', 'ray', a Cluster or None, got {executor!r}")
    from cqs.executors.ray import Cluster
    from cqs.executors.ray.differentiable import attend_on

    if not isinstance(executor, str | Cluster):
        raise TypeError(f"executor must be 'local', 'ray', a Cluster or None, got {executor!r}")
    answer = attend_on(
        Cluster if isinstance(executor, str) else lambda: nullcontext(executor),
        problem,
        num_tasks=num_tasks,
        interest_set=interest_set,
        backend=backend,
        verify=verify,
    )
    return (answer.output, answer.lse) if return_lse else answer.output
