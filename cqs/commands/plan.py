"""Show the tasks of a plan as a table, JSON or a picture."""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import mean, pstdev
from typing import Any

from cqs.arguments import as_integer
from cqs.commands.options import add_causal, add_heads, note_idle, parse_integer, parse_integers
from cqs.patterns.text import PATTERN_HELP, parse_pattern
from cqs.report.table import mebibytes, percent, show, tabulate
from cqs.scheduler import AttentionShape, Plan, Quorums, Task, make_plan
from cqs.scheduler.interest_set_costs import (
    InterestSetCosts,
    choose_interest_set,
    compare_interest_sets,
)

_MAX_TABULATED = 2**20
"""Most pairs of token groups in the table, W per task; they take about 2 s."""
_MAX_LISTED = 1024
"""Most tasks in a picture or a list, which have one entry per pair of token groups."""

_MOST_BINS, _MOST_MARKS = 10, 40
"""Most lines of a histogram, and characters of a bar."""
_SET_COLUMNS: dict[str, Callable[[InterestSetCosts], object]] = {
    "interest set": lambda costs: " ".join(map(str, costs.interest_set)),
    "longest": lambda costs: f"{costs.longest:,}",
    "mean tokens": lambda costs: f"{costs.mean_tokens:,.1f}",
    "KiB in and out": lambda costs: f"{costs.traffic / 1024:,.1f}",
    "peak KiB": lambda costs: f"{costs.memory / 1024:,.1f}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs plan``."""
    add = parser.add_argument
    add("--seqlen", dest="seqlen_q", type=parse_integer, default=16384, metavar="N")
    add("--seqlen-kv", type=parse_integer, metavar="N", help="default: as many as queries")
    add("--tasks", dest="num_tasks", type=parse_integer, default=7, metavar="W", help="default: 7")
    add_causal(parser, default=False)
    add("--pattern", metavar="CALL", help=PATTERN_HELP)
    add(
        "--interest-set", type=_parse_interest_set, metavar="A,B,...",
        help="the elements, or traffic or memory for the stored set with the least of it; default: "
        "the best known",
    )  # fmt: skip
    add(
        "--interest-sets", type=parse_integer, metavar="W",
        help="list the stored interest sets of W tasks with their costs; default: show a plan",
    )  # fmt: skip
    kinds = "quorums", "rows", "grid", "documents"
    add("--kind", choices=kinds, default="quorums", help="default: quorums")
    purpose = "for the predicted costs"
    add_heads(parser, 8, 64, purpose, purpose)
    add("--itemsize", type=int, default=2, help=f"bytes per element, {purpose}")
    add(
        "--json", nargs="?", const="numbers", choices=("numbers", "tasks"),
        help="print the plan as one object: the numbers that define it, or also the tasks that "
        "they imply; default: numbers",
    )  # fmt: skip
    add("--rows", type=parse_integer, default=16, help="most tasks in the table; default: 16")
    add("--picture", metavar="FILE", help="draw the score matrix by owner; default: a table")


def _parse_interest_set(text: str) -> str | list[int]:
    return text if text in ("traffic", "memory") else parse_integers(text)


def run(options: argparse.Namespace) -> None:
    """Print the plan, and draw it with ``--picture``."""
    if options.interest_sets is not None and (options.json or options.picture is not None):
        raise ValueError("--interest-sets prints a table, and must be without --json and --picture")
    if options.picture is not None:
        as_integer("--tasks with --picture", options.num_tasks, 1, _MAX_LISTED)
        from cqs.plotting import check_picture, save_owners

        check_picture(options.picture)
    if options.json == "tasks":
        as_integer("--tasks with --json tasks", options.num_tasks, 1, _MAX_LISTED)
    problem: dict[str, Any] = {
        "seqlen_q": options.seqlen_q,
        "seqlen_kv": options.seqlen_kv,
        "num_tasks": options.num_tasks,
        "is_causal": options.is_causal,
        "pattern": None if options.pattern is None else parse_pattern(options.pattern),
    }
    heads = options.num_heads, options.head_dim
    shape = AttentionShape(*heads, num_kv_heads=options.num_kv_heads, itemsize=options.itemsize)
    if options.interest_sets is not None:
        problem["num_tasks"] = options.interest_sets
        default = make_plan(1, num_tasks=options.interest_sets).interest_set
        columns = _SET_COLUMNS | {"default": lambda costs: "*" * (costs.interest_set == default)}
        show(tabulate(compare_interest_sets(make_plan(**problem), shape), columns))
        return
    chosen = options.interest_set
    if isinstance(chosen, str):
        chosen = choose_interest_set(make_plan(**problem), shape, by=chosen)
    plan = make_plan(**problem, kind=Quorums(tuple(chosen)) if chosen else options.kind)
    note_idle(plan.num_tasks, max(plan.seqlen_q, plan.seqlen_kv))
    if options.json:
        print(plan.to_json(list_tasks=options.json == "tasks"))
    else:
        _print_tasks(plan, shape, as_integer("--rows", options.rows, 1))
    if options.picture is not None:
        save_owners(plan, options.picture)
        print(f"picture: {options.picture}", file=sys.stderr)


def _print_tasks(plan: Plan, shape: AttentionShape, most_rows: int) -> None:
    """Print the plan, its first tasks with their predicted costs, and how much all tasks hold."""
    cost = cache(partial(plan.predict_cost, shape=shape))
    columns: dict[str, Callable[[Task], object]] = {
        **task_columns(plan),
        "GFLOP": lambda task: f"{cost(task.index).flops / 1e9:.4g}",
        "MiB in": lambda task: mebibytes(cost(task.index).bytes_in),
        "MiB out": lambda task: mebibytes(cost(task.index).bytes_out),
        "peak MiB": lambda task: mebibytes(cost(task.index).peak_bytes),
    }
    num_seen = max(1, min(plan.num_tasks, _MAX_TABULATED // plan.num_tasks))
    num_rows = min(num_seen, most_rows)
    print(plan)
    show(tabulate(map(plan.task, range(num_rows)), columns))
    if num_rows < plan.num_tasks:
        print(f"... and {plan.num_tasks - num_rows} tasks more")
    if num_seen == plan.num_tasks:
        print(f"responsibility ratio {plan.responsibility_ratio:.4g}")
        print(_summarize_tokens([task.held_tokens for task in plan.tasks]))


def _summarize_tokens(lengths: Sequence[int]) -> str:
    """Describe the numbers of tokens that tasks hold, the lengths of their subsequences."""
    low, high = min(lengths), max(lengths)
    lines = [
        f"tokens of a task: longest {high:,}, shortest {low:,}, mean {mean(lengths):,.1f}, "
        f"standard deviation {pstdev(lengths):,.1f}"
    ]
    width = -(-(high - low + 1) // _MOST_BINS)
    counts = Counter((length - low) // width for length in lengths)
    for i in sorted(counts) if high > low else []:
        first, last = low + i * width, min(low + (i + 1) * width - 1, high)
        bar = "#" * round(_MOST_MARKS * counts[i] / max(counts.values()))
        lines.append(f"{first:>12,} .. {last:<12,} {counts[i]:>6,} {bar}".rstrip())
    return "\n".join(lines)


def task_columns(plan: Plan) -> dict[str, Callable[[Task], object]]:
    """Return columns about the inputs and the work of a plan's tasks."""
    tokens, live_pairs = max(plan.seqlen_q, plan.seqlen_kv, 1), max(plan.live_pairs, 1)
    return {
        "task": lambda task: task.index,
        "groups": lambda task: " ".join(map(str, task.held_groups)),
        "tokens": lambda task: percent(task.held_tokens / tokens),
        "pairs": lambda task: percent(task.live_pairs / live_pairs),
    }
