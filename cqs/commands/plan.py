"""Show the tasks of a plan as a table, JSON or a picture."""

import argparse
from collections.abc import Callable
from functools import cache, partial

from cqs.arguments import as_integer
from cqs.commands.integers import parse_integer, parse_integers
from cqs.patterns.text import PATTERN_HELP, parse_pattern
from cqs.report.table import mebibytes, percent, tabulate
from cqs.scheduler import AttentionShape, Plan, Quorums, Task, make_plan

_MAX_TABULATED = 2**20
"""Most pairs of token groups in the table, W per task; they take about 2 s."""
_MAX_DRAWN = 1024
"""Most tasks in a picture, which has one shape per pair of token groups."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs plan``."""
    add = parser.add_argument
    add("--seqlen", dest="seqlen_q", type=parse_integer, default=16384, metavar="N")
    add("--seqlen-kv", type=parse_integer, metavar="N", help="default: as many as queries")
    add("--tasks", dest="num_tasks", type=parse_integer, default=7, metavar="W", help="default: 7")
    add("--is-causal", "--causal", action="store_true")
    add("--pattern", metavar="CALL", help=PATTERN_HELP)
    add("--interest-set", type=parse_integers, metavar="A,B,...", help="default: the best known")
    kinds = "quorums", "rows", "grid", "documents"
    add("--kind", choices=kinds, default="quorums", help="default: quorums")
    add("--num-heads", type=int, default=8, help="for the predicted costs")
    add("--head-dim", type=int, default=64, help="for the predicted costs")
    add("--itemsize", type=int, default=2, help="bytes per element, for the predicted costs")
    add(
        "--json", nargs="?", const="numbers", choices=("numbers", "tasks"),
        help="print the plan as one object: the numbers that define it, or also the tasks that "
        "they imply; default: numbers",
    )  # fmt: skip
    add("--picture", metavar="FILE", help="draw the score matrix by owner")


def run(options: argparse.Namespace) -> None:
    """Print the plan, and draw it with ``--picture``."""
    if options.picture:
        as_integer("--tasks with --picture", options.num_tasks, 1, _MAX_DRAWN)
        from cqs.plotting import check_picture, save_owners

        check_picture(options.picture)
    plan = make_plan(
        options.seqlen_q,
        options.seqlen_kv,
        num_tasks=options.num_tasks,
        is_causal=options.is_causal,
        kind=Quorums(tuple(options.interest_set)) if options.interest_set else options.kind,
        pattern=None if options.pattern is None else parse_pattern(options.pattern),
    )
    shape = AttentionShape(options.num_heads, options.head_dim, itemsize=options.itemsize)
    if options.json:
        print(plan.to_json(list_tasks=options.json == "tasks"))
    else:
        _print_tasks(plan, shape)
    if options.picture:
        save_owners(plan, options.picture)


def _print_tasks(plan: Plan, shape: AttentionShape) -> None:
    """Print the plan, its first tasks with their predicted costs, and what is not tabulated."""
    cost = cache(partial(plan.predict_cost, shape=shape))
    columns: dict[str, Callable[[Task], object]] = {
        **task_columns(plan),
        "GFLOP": lambda task: f"{cost(task.index).flops / 1e9:.4g}",
        "MiB in": lambda task: mebibytes(cost(task.index).bytes_in),
        "MiB out": lambda task: mebibytes(cost(task.index).bytes_out),
        "peak MiB": lambda task: mebibytes(cost(task.index).peak_bytes),
    }
    num_rows = max(1, min(plan.num_tasks, _MAX_TABULATED // plan.num_tasks))
    print(plan)
    print(tabulate(map(plan.task, range(num_rows)), columns))
    if num_rows == plan.num_tasks:
        print(f"responsibility ratio {plan.responsibility_ratio:.4g}")
    else:
        print(f"... and {plan.num_tasks - num_rows} tasks more")


def task_columns(plan: Plan) -> dict[str, Callable[[Task], object]]:
    """Return columns about the inputs and the work of a plan's tasks."""
    tokens, live_pairs = max(plan.seqlen_q, plan.seqlen_kv, 1), max(plan.live_pairs, 1)
    return {
        "task": lambda task: task.index,
        "groups": lambda task: " ".join(map(str, task.held_groups)),
        "tokens": lambda task: percent(task.held_tokens / tokens),
        "pairs": lambda task: percent(task.live_pairs / live_pairs),
    }
