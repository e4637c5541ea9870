"""Show who would compute what: a table, JSON or a picture."""

import argparse

from cqs.commands.integers import parse_integer
from cqs.commands.pattern_text import PATTERN_HELP, parse_pattern
from cqs.commands.table import format_table, mebibytes, percent
from cqs.scheduler import AttentionShape, Plan, make_plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs plan``."""
    parser.add_argument("--seqlen-q", "--tokens", type=parse_integer, default=16384, metavar="N")
    parser.add_argument(
        "--seqlen-kv", type=parse_integer, metavar="N", help="default: as many as queries"
    )
    parser.add_argument("--num-workers", "--workers", type=int, default=7, metavar="W")
    parser.add_argument("--is-causal", "--causal", action="store_true")
    parser.add_argument("--pattern", metavar="CALL", help=PATTERN_HELP)
    parser.add_argument(
        "--interest-set", metavar="A,B,...", help="default: the best known; integers with commas"
    )
    parser.add_argument("--num-heads", type=int, default=8, help="for the predicted costs")
    parser.add_argument("--head-dim", type=int, default=64, help="for the predicted costs")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes per element, likewise")
    parser.add_argument("--json", action="store_true", help="print the whole plan as one object")
    parser.add_argument("--picture", metavar="FILE", help="draw the score matrix by owner")


def run(options: argparse.Namespace) -> None:
    """Print the plan."""
    if options.picture:
        from cqs.plotting import check_picture, save_owners

        check_picture(options.picture)
    interest_set = None
    if options.interest_set is not None:
        try:
            interest_set = [int(part) for part in options.interest_set.split(",")]
        except ValueError:
            raise ValueError(
                f"--interest-set must be integers with commas, got {options.interest_set!r}"
            ) from None
    plan = make_plan(
        options.seqlen_q,
        options.seqlen_kv,
        num_workers=options.num_workers,
        is_causal=options.is_causal,
        interest_set=interest_set,
        pattern=None if options.pattern is None else parse_pattern(options.pattern),
    )
    shape = AttentionShape(options.num_heads, options.head_dim, itemsize=options.itemsize)
    if options.json:
        print(plan.to_json())
    else:
        print(plan)
        print(plan_table(plan, shape))
    if options.picture:
        save_owners(plan, options.picture)


def plan_table(plan: Plan, shape: AttentionShape) -> str:
    """Tabulate the tasks of a plan with their predicted costs."""
    rows = []
    for task in plan.tasks:
        cost = plan.predict_cost(task.worker, shape)
        rows.append(
            [
                task.worker,
                " ".join(map(str, task.held_groups)),
                percent(task.held_tokens / max(plan.seqlen_q, plan.seqlen_kv, 1)),
                percent(task.live_pairs / max(plan.live_pairs, 1)),
                f"{cost.flops / 1e9:.4g}",
                mebibytes(cost.bytes_in),
                mebibytes(cost.bytes_out),
                mebibytes(cost.peak_bytes),
            ]
        )
    header = ["worker", "groups", "tokens", "pairs", "GFLOP", "MiB in", "MiB out", "peak MiB"]
    return format_table(header, rows)
