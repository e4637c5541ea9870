"""Attend to a real text on a private Ray cluster, checked and tabulated."""

import argparse
import time
from collections.abc import Callable
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import cqs
from cqs.arguments import as_integer
from cqs.commands.integers import parse_integer
from cqs.commands.plan import task_columns
from cqs.commands.written_files import check_written
from cqs.executors.ray import RunReport
from cqs.files import check_input_file
from cqs.problem import Problem, check_problem
from cqs.report.table import mebibytes, percent, tabulate
from cqs.scheduler import Plan, Task, TaskCost

_NUM_HEADS, _HEAD_DIM = 8, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs demo``."""
    parser.add_argument("--text", metavar="FILE", help="default: Python's own help topics")
    parser.add_argument(
        "--seqlen", type=parse_integer, default=16384, metavar="N", help="bytes to read"
    )
    parser.add_argument(
        "--tasks", dest="num_tasks", type=parse_integer, default=7, metavar="W", help="default: 7"
    )
    parser.add_argument(
        "--actors", type=int, metavar="P", help="default: one per GPU, else per core"
    )
    parser.add_argument("--is-causal", "--causal", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", metavar="FILE", help="draw the score matrix by owner")


def run(options: argparse.Namespace) -> None:
    """Run the main job and print what happened."""
    if options.picture:
        from cqs.plotting import check_picture, save_owners

        check_picture(options.picture)
        check_written("--picture", options.picture, [options.text])
    path, length = options.text or topics.__file__, as_integer("--seqlen", options.seqlen, 1)
    check_input_file(path)
    with open(path, "rb") as file:
        text = file.read(length)
    if not text:
        raise ValueError(f"--text must not be empty, got {path!r}")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    tensors = project_text(text, options.seed, dtype)
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
    print(run_table(report, dense_seconds))
    difference = float((output - dense).abs().max())
    print(f"float64 on sampled rows: correct; largest difference from dense: {difference:.2g}")
    if options.picture:
        save_owners(plan, options.picture)
        print(f"score matrix by owner: {options.picture}")


def project_text(text: bytes, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Make query, key and value, ``[1, 8, len(text), 64]``, from bytes by seeded projections."""
    generator = torch.Generator().manual_seed(seed)
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


def run_table(report: RunReport, dense_seconds: float) -> str:
    """Return a text table of the parts of a run's time."""
    parts = {
        "before the slowest actor's first task: plan, put, fetch": report.before_seconds,
        "its computation": report.slowest_seconds,
        "between its tasks: fetch, return": report.between_seconds,
        "after its last task: return, merge, waiting": report.after_seconds,
        "the run": report.seconds,
        "of it on the driver, meanwhile: put": report.put_seconds,
        "get": report.get_seconds,
        "merge": report.merge_seconds,
        "for comparison: one dense call on all cores": dense_seconds,
    }
    columns: dict[str, Callable[[str], object]] = {
        "part": str,
        "s": lambda name: f"{parts[name]:.3f}",
        "of the run": lambda name: percent(parts[name] / report.seconds),
    }
    return tabulate(parts, columns)
