"""Attend to random tensors on a private Ray cluster, checked and tabulated."""

import argparse
import importlib.util
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cqs
from cqs.arguments import as_integer
from cqs.commands.options import add_causal, note_idle, note_start, parse_integer
from cqs.commands.plan import task_columns
from cqs.executors.ray import AttentionFuture, RunReport, TaskReport
from cqs.executors.verify import VerificationError
from cqs.problem import Problem, check_problem
from cqs.report.table import Table, mebibytes, percent, show, tabulate
from cqs.scheduler import Plan, Task, TaskCost

_NUM_HEADS, _HEAD_DIM = 8, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs demo``."""
    add = parser.add_argument
    add("--seqlen", type=parse_integer, default=16384, metavar="N", help="default: 16K")
    add("--tasks", dest="num_tasks", type=parse_integer, default=7, metavar="W", help="default: 7")
    add("--workers", type=int, metavar="P", help="default: one per GPU, else per core")
    add_causal(parser, default=False)
    add("--kill", action="store_true", help="compute again while workers are killed and join")


def run(options: argparse.Namespace) -> None:
    """Run the main job and print what happened."""
    shape = 3, 1, _NUM_HEADS, as_integer("--seqlen", options.seqlen, 1), _HEAD_DIM
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    query, key, value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    problem = check_problem(query, key, value, is_causal=options.is_causal)
    plan = problem.make_plan(options.num_tasks)
    print(f"random tensors, {_NUM_HEADS} heads of {_HEAD_DIM}, {dtype}")
    print(plan)
    note_idle(plan.num_tasks, options.seqlen)

    arguments = {"is_causal": options.is_causal, "num_tasks": plan.num_tasks, "verify": True}
    if importlib.util.find_spec("ray") is None:
        if options.kill:
            raise ValueError("--kill requires Ray: pip install 'cqs-attention[ray]'")
        print("without Ray one process computes all tasks: pip install 'cqs-attention[ray]'")
        start = time.perf_counter()
        output = cqs.attention(query, key, value, **arguments)
        tasks_seconds = time.perf_counter() - start
    else:
        output, tasks_seconds = _attend_on_workers(options, problem, plan, arguments)
    assert isinstance(output, Tensor)
    start = time.perf_counter()
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=options.is_causal)
    seconds = time.perf_counter() - start
    on_gpus = torch.cuda.is_available()
    hint = "" if on_gpus or tasks_seconds < seconds else "; tasks on the same cores saved no time"
    print(f"one dense call on all cores: {seconds:.2f} s{hint}")
    difference = float((output - dense).abs().max())
    print(f"float64 on sampled rows: correct; largest difference from dense: {difference:.2g}")


def _attend_on_workers(
    options: argparse.Namespace, problem: Problem, plan: Plan, arguments: dict[str, Any]
) -> tuple[Tensor, float]:
    """Return output and seconds of a private cluster, and print what its workers did."""
    note_start()
    start = time.perf_counter()
    tensors = problem.query, problem.key, problem.value
    with cqs.Cluster(options.workers) as cluster:
        print(f"{len(cluster.pids)} workers in {time.perf_counter() - start:.1f} s")
        submit = partial(cluster.submit, *tensors, **arguments)
        future = submit(progress=True)
        output, report = future.result(), future.report
        assert isinstance(output, Tensor)
        show(tasks_table(problem, plan, report))
        print(
            f"{report.seconds:.2f} s, of which {percent(report.overhead)} are transfers, merges "
            "and waiting"
        )
        if options.kill:
            _kill_one(cluster, submit, output)
    return output, report.seconds


def _kill_one(
    cluster: cqs.Cluster, submit: Callable[..., AttentionFuture], expected: Tensor
) -> None:
    """Kill the only worker after its first task, let others join, and compare the result.

    Args:
        cluster: The cluster.
        submit: Starts the call.
        expected: Its result without failures.

    Raises:
        VerificationError: The result is not bitwise identical.
    """
    number, victims = len(cluster.pids), [cluster.pids[0]]

    def strike(done: int, total: int) -> None:
        if victims:
            os.kill(victims.pop(), signal.SIGKILL)
            cluster.scale(number)

    print(
        "The same call again on one worker, which is killed while others join; Ray logs the kill:"
    )
    cluster.scale(1)
    future = submit(progress=strike)
    output, report = future.result(), future.report
    if not (isinstance(output, Tensor) and torch.equal(output, expected)):
        raise VerificationError("the result differs after a worker was killed")
    show(workers_table(report))
    print(
        f"{report.reruns} tasks ran again in {report.rerun_seconds:.2f} s, "
        f"{report.seconds:.2f} s in all, the result is bitwise identical"
    )


def workers_table(report: RunReport) -> Table:
    """Return a table of the workers of a call, in the order in which they joined it."""
    columns: dict[str, Callable[[Sequence[TaskReport]], object]] = {
        "worker": lambda tasks: tasks[0].pid,
        "from s": lambda tasks: f"{tasks[0].started - report.started:.2f}",
        "to s": lambda tasks: f"{tasks[-1].started + tasks[-1].seconds - report.started:.2f}",
        "tasks": lambda tasks: " ".join(str(task.index) for task in tasks),
    }
    return tabulate(report.by_process.values(), columns)


def tasks_table(problem: Problem, plan: Plan, report: RunReport) -> Table:
    """Return a table of every task: its inputs, its predicted and its measured costs."""
    measured = {task.index: task for task in report.tasks}

    def predict(task: Task) -> TaskCost:
        return plan.predict_cost(task.index, problem.shape, measured[task.index].backend)

    columns: dict[str, Callable[[Task], object]] = {
        **task_columns(plan),
        "predicted MiB": lambda task: mebibytes(predict(task).peak_bytes),
        "peak MiB": lambda task: mebibytes(measured[task.index].peak_bytes),
        "s": lambda task: f"{measured[task.index].seconds:.2f}",
        "worker": lambda task: f"{measured[task.index].device} {measured[task.index].pid}",
    }
    return tabulate(map(plan.task, measured), columns)
