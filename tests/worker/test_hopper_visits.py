"""The backward kernel of five products for sparse patterns on Hopper GPUs, and its lists."""

import numpy as np
import pytest
import torch
from sparse_cases import with_pattern

from benchmarks.cases import Case
from cqs.patterns import bigbird, dilated, documents, sliding_window
from cqs.problem.dropout import Dropout
from cqs.problem.score_terms import ScoreTerms
from cqs.worker.operands import TaskOperands
from cqs.worker.triton.visits import (
    MASK_INTEGERS,
    VISIT_BLOCK,
    VISIT_MASK,
    VISIT_TURN,
    count_visits,
    make_visit_list,
)

pytest.importorskip("triton")

from cqs.worker.triton import rectangle_launch
from tests.worker.hopper import BF16, count_pairs, plan_work

LENGTHS = pytest.mark.parametrize(
    "lengths", [(1000, 1000), (1024, 1024), (300, 1000), (1000, 300), (65, 65)], ids=str
)


NAMES = pytest.mark.parametrize(
    "name",
    [
        *("causal-window", "window", "ahead", "bigbird", "longformer", "block-diagonal"),
        *("documents", "documents-both-ways", "mask"),
    ],
)


def find_work(lengths, name, num_tasks=1):
    """Return the work of a pattern."""
    if name == "bigbird":
        pattern = bigbird(block=64)
    else:
        pattern = with_pattern(Case("visits", *lengths), name).pattern
    return plan_work(*lengths, num_tasks=num_tasks, pattern=pattern)


@LENGTHS
@NAMES
@pytest.mark.parametrize("num_tasks", [1, 3])
def test_visits_have_every_live_pair_once(lengths, name, num_tasks):
    work = find_work(lengths, name, num_tasks)
    starts, visits, masks, num_unvisited = make_visit_list(work, *lengths)
    num_tiles, num_blocks = -(-lengths[1] // 128), -(-lengths[0] // 64)
    found = np.zeros((num_blocks * 64, num_tiles * 128), np.int64)
    turns = np.zeros(num_blocks, np.int64)
    query = np.arange(64)
    for tile in range(num_tiles):
        of_tile = visits[starts[tile] : starts[tile + 1]]
        assert (np.diff(of_tile[:, VISIT_BLOCK]) < 0).all()  # from the last block on
        assert (of_tile[:, VISIT_TURN] == turns[of_tile[:, VISIT_BLOCK]]).all()
        turns[of_tile[:, VISIT_BLOCK]] += 1
        for record in of_tile:
            live = np.ones((128, 64), np.int64)
            if (start := record[VISIT_MASK]) >= 0:
                integers = masks.reshape(-1)[start : start + MASK_INTEGERS].reshape(128, 4)
                live = integers[:, query // 2 % 4] >> (query // 8 * 2 + query % 2) & 1
            rows, columns = record[VISIT_BLOCK] * 64, tile * 128
            found[rows : rows + 64, columns : columns + 128] += live.T
    assert not found[: lengths[0], lengths[1] :].any()
    assert (found[: lengths[0], : lengths[1]] == count_pairs(work, lengths)).all()
    assert num_unvisited == (turns == 0).sum()
    counts = count_visits(work, *lengths, 2**20)
    assert counts.num_visits >= len(visits)  # some masks may be empty
    assert counts.has_bits == any(v.bits is not None for row in work.block_rows for v in row.views)
    assert count_visits(work, *lengths, counts.num_visits) == counts
    assert count_visits(work, *lengths, counts.num_visits - 1) is None


def test_views_with_steps_have_no_visits():
    work = plan_work(1000, 1000, pattern=dilated(500, 500, 2))
    assert count_visits(work, 1000, 1000, 2**20) is None


def test_many_visits_are_not_counted_one_by_one(monkeypatch):
    monkeypatch.setattr("cqs.worker.triton.visits._cut", None)
    work = plan_work(2**22, 2**22, num_tasks=7, is_causal=True)
    assert count_visits(work, 2**22, 2**22, 2**20) is None


@pytest.mark.parametrize(
    ("tokens", "heads", "options", "kernel"),
    [
        (8192, 4, {}, "rectangles"),
        (4096, 4, {}, None),
        (16_384, 1, {}, None),
        (16_384, 1, {"is_causal": True}, "rectangles"),
        (32_768, 16, {"num_tasks": 3}, "rectangles"),
        (16_384, 16, {"pattern": sliding_window(2000, 2000)}, "visits"),
        (16_384, 16, {"pattern": sliding_window(100, 0)}, None),
        (16_384, 16, {"pattern": documents(range(0, 16_385, 2048))}, "visits"),
        (16_384, 16, {"pattern": bigbird(block=128)}, None),
    ],
    ids=str,
)
def test_large_rectangles_and_patterns_without_gaps_have_their_kernels(
    tokens, heads, options, kernel
):
    query = torch.empty(1, heads, tokens, 128, device="meta", dtype=BF16)
    operands = TaskOperands(query, query, query, plan_work(tokens, tokens, **options), 0.1)
    if "pattern" in options:
        assert rectangle_launch.takes_visits(operands) is (kernel == "visits")
    else:
        assert rectangle_launch.takes_rectangle_kernel(operands) is (kernel == "rectangles")


def test_dropout_and_score_terms_have_other_kernels():
    query, whole = torch.empty(1, 4, 8192, 128, device="meta", dtype=BF16), [range(8192)]
    operands = TaskOperands(query, query, query, plan_work(8192, 8192), 0.1)
    assert rectangle_launch.takes_rectangle_kernel(operands)
    capped = ScoreTerms(softcap=20.0).pair_terms(torch.device("cpu"), whole, whole)
    for other in operands._replace(dropout=Dropout(0.5, 0)), operands._replace(terms=capped):
        assert not rectangle_launch.takes_rectangle_kernel(other)
