"""Data of the page that shows quorums, owners and costs for any number of tasks."""

import json
import string
from typing import Any

import numpy as np

from cqs.patterns import Pattern, sliding_window
from cqs.plotting.colors import OKABE_ITO
from cqs.scheduler import AttentionShape, Plan, make_plan
from cqs.scheduler.cost_model import Machine, Workload, predict

MOST_TASKS = 31
TOKENS = 2**20
"""Tokens of the problem whose costs the page scales: all are proportional to the tokens."""
_HEADS, _HEAD_DIM = 32, 128
_TOKENS_OF_A_GROUP = 2
_METHODS = "cqs", "cqs quorums", "ring", "all-gather", "ulysses", "2-D"
_LETTERS = string.digits + string.ascii_letters


def make_data() -> dict[str, Any]:
    """Return the interest set, owners and predicted costs of each number of tasks, for JSON.

    Returns:
        Letters of owners, tokens of a group, colours; and for each number of tasks the interest
        set; by kind of attention the owners of all cells of a score matrix of two tokens per group,
        row by row, as letters and ``"."`` where no pair is live; and bytes per token that a device
        receives and holds, by kind and method.
    """
    return {
        "letters": _LETTERS,
        "groups": _TOKENS_OF_A_GROUP,
        "colors": OKABE_ITO,
        "tasks": {number: _describe(number) for number in range(1, MOST_TASKS + 1)},
    }


def write_script() -> str:
    """Return the data as a script that defines ``EXPLORER``."""
    return f"const EXPLORER = {json.dumps(make_data(), separators=(',', ':'))};\n"


def _describe(num_tasks: int) -> dict[str, Any]:
    tokens = _TOKENS_OF_A_GROUP * num_tasks
    width = max(tokens // 8, 1)
    kinds: dict[str, tuple[bool, Pattern | None]] = {
        "non-causal": (False, None),
        "causal": (True, None),
        "window": (False, sliding_window(width, width)),
    }
    plans = {
        kind: make_plan(tokens, num_tasks=num_tasks, is_causal=is_causal, pattern=pattern)
        for kind, (is_causal, pattern) in kinds.items()
    }
    return {
        "interest": list(plans["causal"].interest_set),
        "owners": {kind: _owners(plan) for kind, plan in plans.items()},
        "costs": {
            kind: _costs(num_tasks, is_causal)
            for kind, (is_causal, pattern) in kinds.items()
            if pattern is None
        },
    }


def _owners(plan: Plan) -> str:
    owners = np.full((plan.seqlen_q, plan.seqlen_kv), ".")
    for task in plan.tasks:
        for queries, keys, is_causal in task.blocks:
            live = np.ones((len(queries), len(keys)), dtype=bool)
            live = np.tril(live) if is_causal else live
            view = owners[queries.start : queries.stop, keys.start : keys.stop]
            view[live] = _LETTERS[task.index]
    if plan.pattern is not None:
        owners[~plan.pattern.to_mask(plan.seqlen_q, plan.seqlen_kv)] = "."
    return "".join(owners.ravel().tolist())


def _costs(num_tasks: int, is_causal: bool) -> dict[str, tuple[float, float]]:
    """Return bytes per token that a device receives and holds, forward, by method."""
    workload = Workload(TOKENS, AttentionShape(_HEADS, _HEAD_DIM), is_causal)
    found = {name: predict(name, workload, num_tasks, Machine()) for name in _METHODS}
    return {
        name: (round(each.bytes_received / TOKENS, 1), round(each.peak_bytes / TOKENS, 1))
        for name, each in found.items()
        if each is not None
    }
