"""The identity of a reproducible result."""

import hashlib
import json
from typing import Unpack

from torch import Tensor

from cqs.problem import check_problem
from cqs.problem.options import ProblemOptions
from cqs.scheduler import Kind
from cqs.worker.environment import describe_environment
from cqs.worker.units import UnitWorker


def fingerprint(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: Kind | str | None = None,
    backend: str | None = None,
    **options: Unpack[ProblemOptions],
) -> dict[str, str]:
    """Return what the bits of a reproducible call depend on besides the values of its tensors.

    Two calls with ``reproducible=True`` and equal tensors have equal results on one model of device
    if their fingerprints are equal.

    Args:
        query: ``[batch, num_heads, seqlen_q, head_dim]``, on the type of device that computes.
        key: ``[batch, num_kv_heads, seqlen_kv, head_dim]``.
        value: ``[batch, num_kv_heads, seqlen_kv, value_dim]``.
        plan: Kind of the plan, see :func:`cqs.attention`.
        backend: Name of a backend.
        **options: The options of the call, see :class:`cqs.problem.options.ProblemOptions`.

    Returns:
        Names and values: shapes, options, tasks and interest sets of the plans, backends, model of
        the GPU or instruction set of the CPU, versions of libraries, and a digest of the code of
        cqs. That of all of these has the name ``"digest"``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Arguments do not fit together.
        NotImplementedError: No reproducible backend supports the call.

    Example:
        >>> import torch
        >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
        >>> fingerprint(q, k, v, num_tasks=7)["backend"]
        'cpu'
    """
    if unknown := options.keys() - ProblemOptions.__annotations__:
        raise TypeError(f"options must be those of cqs.attention, got {sorted(unknown)}")
    options["reproducible"] = True
    if options.get("dropout_p") and options.get("seed") is None:
        raise ValueError("seed must be given with dropout_p, got None: it changes the result")
    problem = check_problem(query, key, value, **options)
    parts = [part for _, part in problem.parts()]
    plans = [part.make_plan(part.num_tasks or 1, plan) for part in parts]
    backends = [
        UnitWorker.of(part, backend).choose_backend(part.query, part.key, part.value).name
        for part in parts
    ]
    names = [] if problem.terms is None else sorted(problem.terms.names)
    values = {
        "tensors": f"{problem.shape}, {query.dtype}",
        "options": f"scale {problem.scale}, {problem.dropout}, {', '.join(names)}",
        "plans": "; ".join(dict.fromkeys(map(repr, plans))),
        "backend": ", ".join(dict.fromkeys(backends)),
        **dict(describe_environment(query.device.type)),
    }
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=16)
    return {**values, "digest": digest.hexdigest()}
