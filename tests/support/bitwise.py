"""Record the exact bytes of outputs, gradients and plans, and compare them with a record.

``python -m tests.support.bitwise FILE`` compares; with ``--write`` it writes the record. One thread
computes. Plans are integers and equal everywhere; outputs are comparable between machines with the
same CPU instructions and the same PyTorch.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
import torch.distributed as dist
from torch import Tensor

import cqs
import cqs.distributed
import cqs.streaming
from benchmarks.cases import CASES, Case
from cqs.patterns import (
    Pattern,
    block_diagonal,
    causal,
    dilated,
    documents,
    fixed,
    global_tokens,
    longformer,
    per_head,
    sliding_window,
    strided,
)

PATTERNS: dict[str, Pattern] = {
    "window": sliding_window(20, 0),
    "two-sided": sliding_window(9, 13),
    "dilated": dilated(8, 0, 3),
    "strided": strided(7),
    "fixed": fixed(16, 3),
    "blocks": block_diagonal(32),
    "longformer": longformer(16, [0, 40]),
    "documents": documents([0, 30, 31, 90, 131], is_causal=True),
    "causal-and-global": causal() & (sliding_window(12, 0) | global_tokens(4)),
    "per-head": per_head([[sliding_window(5, 0), causal(), strided(5), causal()]]),
}
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NUM_RANKS = 3


def digest(*tensors: Tensor) -> str:
    """Return a hash of the elements of tensors, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def leaves_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    problem = case.make(dtype)
    tensors = problem.query, problem.key, problem.value
    return [tensor.clone().requires_grad_() for tensor in tensors]


def with_gradients(
    leaves: list[Tensor], attention: Callable[..., Any] = cqs.attention, **options: Any
) -> str:
    """Return the hash of output, lse and gradients of a call in this process."""
    output, lse = attention(*leaves, return_lse=True, **options)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    return digest(output, lse, *torch.autograd.grad(output, leaves, gradient))


def local() -> Iterator[tuple[str, str]]:
    for i, case in enumerate(CASES):
        for j, num_tasks in enumerate((1, 2, 4, 7, 8, 13)):
            name, dtype = list(DTYPES.items())[(i + j) % 4]
            options = {"is_causal": case.is_causal, "scale": case.scale, "num_tasks": num_tasks}
            for backend in ("cpu", "reference")[name == "f64" :]:
                found = with_gradients(leaves_of(case, dtype), backend=backend, **options)
                yield f"local {backend} {case.name} W={num_tasks} {name}", found
    for case in CASES[:4]:
        options = {"is_causal": case.is_causal, "backend": "triton", "num_tasks": 3}
        yield f"local triton {case.name}", with_gradients(leaves_of(case, torch.float32), **options)
    for i, (name, pattern) in enumerate(PATTERNS.items()):
        case = Case(name, 131, 131)
        for j, num_tasks in enumerate((1, 3, 7)):
            kind, dtype = list(DTYPES.items())[(i + j) % 4]
            options = {"pattern": pattern, "num_tasks": num_tasks}
            found = with_gradients(leaves_of(case, dtype), **options)
            yield f"local {name} W={num_tasks} {kind}", found
    leaves = leaves_of(CASES[2], torch.float32)
    for num_tasks in (1, 7):
        options = {"dropout_p": 0.2, "seed": 3, "num_tasks": num_tasks}
        yield f"local dropout W={num_tasks}", with_gradients(leaves, **options)


def streaming() -> Iterator[tuple[str, str]]:
    for case in CASES:
        for budget in (600_000, 2_000_000):
            try:
                found = with_gradients(
                    leaves_of(case, torch.float32),
                    cqs.streaming.attention,
                    is_causal=case.is_causal,
                    scale=case.scale,
                    memory_budget=budget,
                    device="cpu",
                )
            except ValueError as error:
                found = type(error).__name__
            yield f"streaming {case.name} {budget}", found


def on_ray() -> Iterator[tuple[str, str]]:
    with cqs.Cluster(num_workers=2, use_gpus=False) as cluster:
        for case in CASES:
            tensors = [leaf.detach() for leaf in leaves_of(case, torch.float32)]
            options = {"is_causal": case.is_causal, "scale": case.scale}
            for num_tasks in (3, 7):
                future = cluster.submit(*tensors, num_tasks=num_tasks, return_lse=True, **options)
                yield f"ray tasks {case.name} W={num_tasks}", digest(*future.result())
            if min(case.seqlen_q, case.seqlen_kv) < 2:
                continue
            output = cluster.attention(cluster.shard(*tensors), **options)
            yield f"ray shards {case.name}", digest(output.to_local())


def of_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    found = {}
    problems = [(case, {"is_causal": case.is_causal, "scale": case.scale}) for case in CASES]
    problems += [(Case(name, 131, 131), {"pattern": each}) for name, each in PATTERNS.items()]
    for case, options in problems:
        leaves = [
            leaf.detach().tensor_split(NUM_RANKS, dim=2)[rank].requires_grad_()
            for leaf in leaves_of(case, torch.float32)
        ]
        output, *lse = cqs.distributed.attention(*leaves, return_lse=True, **options)
        gradients = torch.autograd.grad(output.square().sum(), leaves)
        of_lse = [] if "pattern" in options else lse  # as the records have it
        found[f"rank {rank} {case.name}"] = digest(output, *of_lse, *gradients)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ranks() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (folder,), nprocs=NUM_RANKS)
        for rank in range(NUM_RANKS):
            yield from json.loads(Path(folder, f"{rank}.json").read_text()).items()


def plans() -> Iterator[tuple[str, str]]:
    def of(plan: Any) -> str:
        parts = []
        for task in plan.tasks:
            steps = [tuple(step) for step in task.steps]
            parts.append((task.held_groups, task.held_queries, task.held_keys, steps))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    for num_tasks in (*range(1, 20), 21, 24, 31, 32, 57, 73, 91, 133):
        plan = cqs.make_plan(1000, num_tasks=num_tasks)
        yield f"plan full W={num_tasks}", of(plan)
        plan = cqs.make_plan(997, num_tasks=num_tasks, is_causal=True)
        yield f"plan causal W={num_tasks}", of(plan)
        plan = cqs.make_plan(300, num_tasks=num_tasks, seqlen_kv=1311, is_causal=True)
        yield f"plan cross W={num_tasks}", of(plan)
    for name, pattern in PATTERNS.items():
        if name == "per-head":
            continue
        for num_tasks in (1, 4, 7, 13):
            plan = cqs.make_plan(131, num_tasks=num_tasks, pattern=pattern)
            yield f"plan {name} W={num_tasks}", of(plan)


def record() -> dict[str, str]:
    """Compute everything."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for part in (plans, local, streaming, ranks, on_ray):
        for name, value in part():
            assert name not in found
            found[name] = value
    return found


def main() -> int:
    """Compare with a record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = record()
    if arguments.write:
        lines = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
        arguments.file.write_text(json.dumps({**lines, "results": found}, indent=0) + "\n")
        print(f"{len(found)} results written")
        return 0
    expected = json.loads(arguments.file.read_text())["results"]
    changed = sorted(
        name for name in expected.keys() | found if expected.get(name) != found.get(name)
    )
    print(f"{len(found)} results, {len(changed)} differ: {changed}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
