"""Which option works on which executor: the table of docs/options.md.

``python tests/option_table.py`` writes the table anew. The rows are the arguments of the public
functions, read from their signatures; a cell without an entry in ``HOLES`` says yes, and
test_option_table.py computes it.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cqs
import cqs.distributed
import cqs.streaming
from cqs.patterns import causal, padded, per_head, sliding_window

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
BEGIN, END = "<!-- table of tests/option_table.py -->\n", "<!-- end of table -->\n"

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "this process": cqs.attention,
    "Ray tasks": cqs.Cluster.attention,
    "Ray tasks, `submit`": cqs.Cluster.submit,
    "Ray shards": cqs.Cluster.attention,
    "ranks": cqs.distributed.attention,
    "streaming": cqs.streaming.attention,
}
"""Executor -> the function that computes on it."""

VALUES: dict[str, dict[str, Any]] = {
    "is_causal": {"is_causal": True},
    "pattern": {"pattern": sliding_window(9, 0)},
    "pattern, one per head": {"pattern": per_head([[sliding_window(9, 0), causal()]])},
    "pattern, of a padded batch": {"pattern": padded([30], [25]) & causal()},
    "scale": {"scale": 0.3},
    "dropout_p": {"dropout_p": 0.2, "seed": 3},
    "seed": {"dropout_p": 0.2, "seed": 3},
    "attn_mask": {"attn_mask": torch.ones(41, 41, dtype=torch.bool).triu(-9)},
    "enable_gqa": {"enable_gqa": False},
    "scores": {"scores": cqs.Scores(sinks=torch.tensor([0.5, -1.0]), softcap=2.0)},
    "num_tasks": {"num_tasks": 5},
    "plan": {"plan": "rows"},
    "backend": {"backend": "reference"},
    "return_lse": {"return_lse": True},
    "verify": {"verify": True},
    "progress": {"progress": max},  # any function of two numbers
    "head_parallel": {"head_parallel": 1},
    "num_chunks": {"num_chunks": 2},
    "links": {"links": (1e9, 1e-4)},
    "max_bytes": {"max_bytes": 20_000},
    "memory_budget": {"memory_budget": 200_000},
    "device": {"device": "cpu"},
    "gradients": {},
}
"""Row -> arguments of a call that uses it."""
OWN = {
    "executor": "chooses the executor",
    "group": "the process group of the ranks",
    **dict.fromkeys(
        ("joint_query", "joint_key", "joint_value", "joint_position"),
        "tokens of which every rank has a copy; elsewhere they are part of the sequence",
    ),
    "out": "a destination in memory or in a file; see [streaming](streaming.md)",
    "resume": "a directory from which a call continues; see [streaming](streaming.md)",
}
"""Arguments of a single function, which are no options of a computation."""

_NO_MASK = "pass `pattern=from_mask(mask)`, or a bias in `scores`"
_ALWAYS = "query heads share KV heads where these are fewer"
_PER_RANK = "every rank computes one task"
_NO_RANKS = "there are no ranks"
_NO_MEMORY = "its inputs are in memory as a whole; `cqs.streaming.attention` reads them in parts"
_OF_TENSORS = "it computes on the device of its tensors"
_PLANNED = "it cuts the problem by the memory budget"
HOLES: dict[tuple[str, str], str] = {
    **{("attn_mask", executor): _NO_MASK for executor in FUNCTIONS if executor != "this process"},
    **{("enable_gqa", executor): _ALWAYS for executor in FUNCTIONS if executor != "this process"},
    **{(row, "Ray shards"): _PER_RANK for row in ("num_tasks", "progress")},
    **{(row, "ranks"): _PER_RANK for row in ("num_tasks", "progress")},
    **{
        ("memory_budget", executor): _NO_MEMORY
        for executor in ("this process", "Ray tasks", "Ray tasks, `submit`", "Ray shards", "ranks")
    },
    **{
        ("device", executor): "it computes on the device of its tensors"
        for executor in ("this process", "ranks")
    },
    **{
        ("device", executor): "the workers' devices are chosen when the cluster starts"
        for executor in ("Ray tasks", "Ray tasks, `submit`", "Ray shards")
    },
    **{(row, "streaming"): _PLANNED for row in ("num_tasks", "plan")},
    ("num_chunks", "Ray shards"): "the cluster chooses the number of chunks",
    ("links", "Ray shards"): "the cluster measures the links between its hosts, once",
    ("gradients", "Ray tasks, `submit`"): "a future has no gradients: call `attention`",
    ("gradients", "Ray shards"): "shards on workers do not record gradients",
    **{
        (row, executor): _NO_RANKS
        for row in ("head_parallel", "num_chunks", "links", "max_bytes")
        for executor in ("this process", "Ray tasks", "Ray tasks, `submit`", "streaming")
    },
}
"""(Row, executor) -> why the executor does not support the option."""


def parameters(executor: str) -> list[str]:
    """List the options of an executor's function."""
    found = inspect.signature(FUNCTIONS[executor]).parameters
    return [name for name in found if name not in ("self", "query", "key", "value")]


def cells() -> list[tuple[str, str]]:
    """List all (row, executor), whether the executor supports the option or not."""
    return [(row, executor) for row in VALUES for executor in FUNCTIONS]


def format_table() -> str:
    """Lay out the table and its notes."""
    reasons = list(dict.fromkeys(HOLES[cell] for cell in cells() if cell in HOLES))
    lines = [" | ".join(["| option", *FUNCTIONS]) + " |", "|---" * (1 + len(FUNCTIONS)) + "|"]
    for row in VALUES:
        found = [HOLES.get((row, executor)) for executor in FUNCTIONS]
        texts = ["yes" if each is None else f"no [{reasons.index(each) + 1}]" for each in found]
        lines.append(" | ".join([f"| {row}", *texts]) + " |")
    notes = [f"- [{i}] {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]) + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{format_table()}\n{END}{after}")
