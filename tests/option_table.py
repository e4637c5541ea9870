"""Axes of the test matrix by executor, and the table of docs/options.md that follows from them.

``python tests/option_table.py`` writes the table anew. A cell says yes if the executor has the
option as an axis, so that test_matrix.py computes it with every value of every other axis.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from support.options import STRATEGY

import cqs
import cqs.distributed
import cqs.streaming
from cqs.patterns import causal, documents, from_mask, padded, per_head, sliding_window, strided

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


def pairs_mask(seqlen_q: int, seqlen_kv: int) -> torch.Tensor:
    """Draw a boolean mask that leaves 30 % of the pairs."""
    return torch.rand(seqlen_q, seqlen_kv, generator=torch.Generator().manual_seed(7)) < 0.3


_HEADS = [sliding_window(3, 2), causal(), strided(4), sliding_window(None, 1)]
MASKS = {
    "none": lambda q, k, batch, heads: None,
    "window": lambda q, k, batch, heads: sliding_window(5, 3),
    "documents": lambda q, k, batch, heads: documents(
        [0, q // 3, q // 3, q // 2, q - 1, q], [0, k // 2, *2 * [max(k - 5, k // 2)], k - 2, k]
    ),  # one without queries, one without keys
    "pairs": lambda q, k, batch, heads: from_mask(pairs_mask(q, k)),
    "per head": lambda q, k, batch, heads: per_head(
        [[_HEADS[(b + h) // 2 % 4] for h in range(heads)] for b in range(batch)]
    ),
    "padded batch": lambda q, k, batch, heads: padded(
        *([max(1, n - 7 * b) for b in range(batch)] for n in (q, k))
    ),
}
"""Name -> pattern of given lengths, batch size and number of heads."""
BIASES = {
    None: lambda q, k, batch, heads: None,
    "per pair": lambda q, k, batch, heads: (batch, heads, q, k),
    "per key": lambda q, k, batch, heads: (1, k),
    "per query": lambda q, k, batch, heads: (heads, q, 1),
}
"""Name -> shape of a bias for given lengths, batch size and number of heads."""
TERMS = "sinks", "softcap", "alibi_slopes", "bias", "score_mod"
PROBLEM: dict[str, list[Any]] = {
    "heads": [(4, 4), (4, 2), (4, 1)],
    "batch": [1, 3, 0],
    "lengths": [(20, 20), (11, 23), (23, 11)],
    "mask": list(MASKS),
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    "has_overlapping_rows": [False, True],
    "is_causal": [False, True],
    "scale": [None, -0.3],
    "dropout_p": [0.0, 0.3],
    "seed": [0, 7],
    **dict.fromkeys(TERMS, [False, True]),
    "bias": list(BIASES),
    "return_lse": [True, False],
    "verify": [False, True],
    "backend": [None, "reference"],
}
_GRADIENTS = {"gradients": [True, False]}
_DEVICE = {"default_device": ["cpu", "meta"]}
_TASKS = {"num_tasks": [None, 1, 3, 7], "plan": [None, "rows", "grid", "quorums"]}
_PROGRESS = {"progress": [False, max]}  # any function of two numbers
_RANKS = {
    "head_parallel": ["auto", 1, 2],
    "plan": [None, "rows", "grid", "quorums"],
    "max_bytes": [None, 1, 2],  # as multiples of the least possible
    "num_chunks": [None, 2],
    "links": [None, (1e9, 1e-4)],
}
AXES: dict[str, dict[str, list[Any]]] = {
    "this process": PROBLEM
    | _GRADIENTS
    | _DEVICE
    | _TASKS
    | {"attn_mask": [False, True], "enable_gqa": [True, False], "compiles_merges": [False, True]},
    "Triton": PROBLEM
    | _GRADIENTS
    | {
        "dtype": [torch.float32, torch.float16],
        "lengths": [(40, 40), (19, 43), (43, 19)],
        "batch": [1, 2],
        "score_mod": [False],
        "backend": ["triton"],
        "num_tasks": [None, 3],
    },
    "Ray tasks": PROBLEM | _GRADIENTS | _TASKS | _PROGRESS,
    "Ray tasks, `submit`": PROBLEM | _TASKS | _PROGRESS,
    "Ray shards": PROBLEM | _RANKS,
    "ranks": PROBLEM
    | _GRADIENTS
    | _DEVICE
    | _RANKS
    | {"joint": ["none", "front", "rear"], "kind": ["plain", "prepared", "DTensor"]},
    "streaming": PROBLEM
    | _GRADIENTS
    | _DEVICE
    | {
        "lengths": [(150, 150), (90, 170), (170, 90)],
        "memory_budget": [1, 3],  # as multiples of the least possible
        "device": [None, "cpu"],
        **_PROGRESS,
        "compiles_merges": [False, True],
    },
}
"""Executor -> axis of its matrix -> values."""
IMPOSSIBLE = (
    {("mask", "per head"), ("head_parallel", 2)},  # every group of heads has one pattern
    {("mask", "documents"), ("attn_mask", True)},  # positions of other kinds
    {("heads", (4, 2)), ("enable_gqa", False)},
    {("heads", (4, 1)), ("enable_gqa", False)},
)
"""Pairs of values that no call has."""


def _same(*rows: str) -> dict[str, str]:
    return {row: row for row in rows}


ROWS = {
    "is_causal": "is_causal",
    "pattern": "mask",
    "pattern, one per head": "mask",
    "pattern, of a padded batch": "mask",
    **_same("scale", "dropout_p", "seed", "attn_mask", "enable_gqa"),
    "scores": "sinks",
    **_same("num_tasks", "plan", "backend", "return_lse", "verify", "progress"),
    **_same("head_parallel", "num_chunks", "links", "max_bytes", "memory_budget", "device"),
    "gradients": "gradients",
}
"""Row of the table -> its axis."""
OWN = {
    "group": "the process group of the ranks",
    "joint": "tokens of which every rank has a copy; elsewhere they are part of the sequence",
    "out": "a destination in memory or in a file; see [files](howto/longer-than-memory.md)",
    "reproducible": "the same on every executor; test_reproducible.py compares all of them",
}
"""Arguments that are no axis of the matrix."""

_NO_MASK = "pass `pattern=from_mask(mask)`, or a bias in `scores`"
_ALWAYS = "query heads share KV heads where these are fewer"
_PER_RANK = "every rank computes one task, unless calls are reproducible"
_AT_ONCE = "`cqs.streaming.attention` and clusters report the progress of long calls"
_NO_RANKS = "there are no ranks"
_NO_MEMORY = "its inputs are in memory as a whole; `cqs.streaming.attention` reads them in parts"
_OF_TENSORS = "it computes on the device of its tensors"
_OF_WORKERS = "the workers' devices are chosen when the cluster starts"
_PLANNED = "the memory budget decides, unless calls are reproducible"


def _holes(reason: str, rows: list[str], executors: Iterable[str]) -> dict[tuple[str, str], str]:
    """Return the reason for all of these rows and executors."""
    return {(row, executor): reason for row in rows for executor in executors}


_HERE, _TASKS_OF_RAY, _FUTURES, _SHARDS, _RANK, _STREAM = FUNCTIONS
_RAY = _TASKS_OF_RAY, _FUTURES, _SHARDS
HOLES = {
    **_holes(_NO_MASK, ["attn_mask"], [*_RAY, _RANK, _STREAM]),
    **_holes(_ALWAYS, ["enable_gqa"], [*_RAY, _RANK, _STREAM]),
    **_holes(_PER_RANK, ["num_tasks", "progress"], [_SHARDS, _RANK]),
    **_holes(_AT_ONCE, ["progress"], [_HERE]),
    **_holes(_NO_MEMORY, ["memory_budget"], [_HERE, *_RAY, _RANK]),
    **_holes(_OF_TENSORS, ["device"], [_HERE, _RANK]),
    **_holes(_OF_WORKERS, ["device"], _RAY),
    **_holes(_PLANNED, ["num_tasks", "plan"], [_STREAM]),
    **_holes("a future has no gradients: call `attention`", ["gradients"], [_FUTURES]),
    **_holes("shards on workers do not record gradients", ["gradients"], [_SHARDS]),
    **_holes(
        _NO_RANKS,
        ["head_parallel", "num_chunks", "links", "max_bytes"],
        [_HERE, _TASKS_OF_RAY, _FUTURES, _STREAM],
    ),
}
"""(Row, executor) -> why the executor does not support the option."""


def least(attend: Callable[..., Any], name: str) -> int:
    """Return the least limit of memory, which errors of smaller limits give."""
    limit = 1
    while True:
        try:
            attend(**{name: limit})
        except ValueError as error:
            found = re.search(rf"{name} must be at least (\d+) ", str(error))
            assert found is not None, error
            limit = int(found[1])
        else:
            return limit


def parameters(function: Callable[..., Any]) -> list[str]:
    """List the parameters of a function, with the fields of unpacked options and of a strategy."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind == inspect.Parameter.VAR_KEYWORD:
            names += get_args(parameter.annotation)[0].__annotations__
        else:
            names += STRATEGY if name == "strategy" else [name]
    return names


def cells() -> list[tuple[str, str]]:
    """List all (row, executor), whether the executor supports the option or not."""
    return [(row, executor) for row in ROWS for executor in FUNCTIONS]


def format_table() -> str:
    """Lay out the table and its notes."""
    reasons = list(dict.fromkeys(HOLES[cell] for cell in cells() if cell in HOLES))
    lines = [" | ".join(["| option", *FUNCTIONS]) + " |", "|---" * (1 + len(FUNCTIONS)) + "|"]
    for row in ROWS:
        found = [HOLES.get((row, executor)) for executor in FUNCTIONS]
        texts = ["yes" if each is None else f"no [{reasons.index(each) + 1}]" for each in found]
        lines.append(" | ".join([f"| {row}", *texts]) + " |")
    notes = [f"- [{i}] {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes]) + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{format_table()}\n{END}{after}")
