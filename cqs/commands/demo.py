"""Attend to Python's own help topics on a private Ray cluster, checked and tabulated."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import cqs
from cqs.arguments import as_integer
from cqs.commands.integers import parse_integer
from cqs.commands.plan import task_columns
from cqs.executors.ray import RunReport
from cqs.problem import Problem, check_problem
from cqs.report.table import mebibytes, percent, tabulate
from cqs.scheduler import Plan, Task, TaskCost

_NUM_HEADS, _HEAD_DIM = 8, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs demo``."""
    add = parser.add_argument
    add("--seqlen", type=parse_integer, default=16384, metavar="N", help="bytes to read")
    add("--tasks", dest="num_tasks", type=parse_integer, default=7, metavar="W", help="default: 7")
    add("--actors", type=int, metavar="P", help="default: one per GPU, else per core")
    add("--is-causal", "--causal", action="store_true")


def run(options: argparse.Namespace) -> None:
    """Run the main job and print what happened."""
    text = Path(topics.__file__).read_bytes()[: as_integer("--seqlen", options.seqlen, 1)]
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    tensors = project_text(text, dtype)
    problem = check_problem(*tensors, is_causal=options.is_causal)
    plan = problem.make_plan(options.num_tasks)
    print(f"{len(text)} bytes of text, {_NUM_HEADS} heads of {_HEAD_DIM}, {dtype}")
    print(plan)

    start = time.perf_counter()
    with cqs.Cluster(options.actors) as cluster:
        print(f"{len(cluster.pids)} actors in {time.perf_counter() - start:.1f} s")
        future = cluster.submit(
            *tensors,
            is_causal=options.is_causal,
            num_tasks=plan.num_tasks,
            verify=True,
            progress=True,
        )
        output, report = future.result(), future.report
    assert isinstance(output, Tensor)
    start = time.perf_counter()
    dense = F.scaled_dot_product_attention(*tensors, is_causal=options.is_causal)
    dense_seconds = time.perf_counter() - start

    print(tasks_table(problem, plan, report))
    print(
        f"{report.seconds:.2f} s, {percent(report.overhead)} of it not computation of the slowest "
        f"actor; one dense call on all cores: {dense_seconds:.2f} s"
    )
    difference = float((output - dense).abs().max())
    print(f"float64 on sampled rows: correct; largest difference from dense: {difference:.2g}")


def project_text(text: bytes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Make query, key and value, ``[1, 8, len(text), 64]``, from bytes by seeded projections."""
    generator = torch.Generator().manual_seed(0)
    width = _NUM_HEADS * _HEAD_DIM
    embedding = torch.randn(256, width, generator=generator)
    weights = torch.randn(3, width, width, generator=generator) * width**-0.5
    tokens = embedding[torch.frombuffer(bytearray(text), dtype=torch.uint8).int()]
    heads = (tokens @ weights).view(3, 1, len(text), _NUM_HEADS, _HEAD_DIM)
    query, key, value = heads.transpose(2, 3).to(dtype).contiguous()
    return query, key, value


def tasks_table(problem: Problem, plan: Plan, report: RunReport) -> str:
    """Return a text table of every task: its inputs, its predicted and its measured costs."""
    measured = {task.index: task for task in report.tasks}

    def predict(task: Task) -> TaskCost:
        return plan.predict_cost(task.index, problem.shape, measured[task.index].backend)

    columns: dict[str, Callable[[Task], object]] = {
        **task_columns(plan),
        "predicted MiB": lambda task: mebibytes(predict(task).peak_bytes),
        "peak MiB": lambda task: mebibytes(measured[task.index].peak_bytes),
        "s": lambda task: f"{measured[task.index].seconds:.2f}",
        "actor": lambda task: f"{measured[task.index].device} {measured[task.index].pid}",
    }
    return tabulate(map(plan.task, measured), columns)
