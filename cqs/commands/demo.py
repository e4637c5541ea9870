"""Attend to random tensors on a private Ray cluster, checked and tabulated."""

import argparse
import time
from collections.abc import Callable

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
    add("--seqlen", type=parse_integer, default=16384, metavar="N", help="default: 16K")
    add("--tasks", dest="num_tasks", type=parse_integer, default=7, metavar="W", help="default: 7")
    add("--actors", type=int, metavar="P", help="default: one per GPU, else per core")
    add("--is-causal", "--causal", action="store_true")


def run(options: argparse.Namespace) -> None:
    """Run the main job and print what happened."""
    shape = 3, 1, _NUM_HEADS, as_integer("--seqlen", options.seqlen, 1), _HEAD_DIM
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    query, key, value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    problem = check_problem(query, key, value, is_causal=options.is_causal)
    plan = problem.make_plan(options.num_tasks)
    print(f"random tensors, {_NUM_HEADS} heads of {_HEAD_DIM}, {dtype}")
    print(plan)

    start = time.perf_counter()
    with cqs.Cluster(options.actors) as cluster:
        print(f"{len(cluster.pids)} actors in {time.perf_counter() - start:.1f} s")
        future = cluster.submit(
            query,
            key,
            value,
            is_causal=options.is_causal,
            num_tasks=plan.num_tasks,
            verify=True,
            progress=True,
        )
        output, report = future.result(), future.report
    assert isinstance(output, Tensor)
    start = time.perf_counter()
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=options.is_causal)
    dense_seconds = time.perf_counter() - start

    print(tasks_table(problem, plan, report))
    print(
        f"{report.seconds:.2f} s, {percent(report.overhead)} of it not computation of the slowest "
        f"actor; one dense call on all cores: {dense_seconds:.2f} s"
    )
    difference = float((output - dense).abs().max())
    print(f"float64 on sampled rows: correct; largest difference from dense: {difference:.2g}")


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
