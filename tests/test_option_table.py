"""Every cell of the table in docs/options.md is computed, or raises an error."""

import pytest
import torch
import torch.distributed as dist
from option_table import (
    BEGIN,
    END,
    FUNCTIONS,
    HOLES,
    OWN,
    PAGE,
    VALUES,
    cells,
    format_table,
    parameters,
)

import cqs
from benchmarks.cases import Case
from cqs.partial import AttentionOutput

CASE = Case("options", 41, 41, num_heads=2, num_kv_heads=2)
MEANING = ("is_causal", "pattern", "scale", "dropout_p", "seed", "scores", "attn_mask")
"""Options that define the result."""


def tensors(row):
    problem = CASE.make(torch.float64)
    found = problem.query, problem.key, problem.value
    return [tensor.requires_grad_(row == "gradients") for tensor in found]


def expected(row):
    options = {name: VALUES[row][name] for name in MEANING if name in VALUES[row]}
    return cqs.attention(*tensors(row), **options)


def on_rank(group, options, needs_grad):
    """Compute on a rank; return its output, or the gradient of its query."""
    problem, rank = CASE.make(torch.float64), dist.get_rank(group)
    number = dist.get_world_size(group)
    shards = [
        tensor.tensor_split(number, dim=2)[rank].clone().requires_grad_(needs_grad)
        for tensor in (problem.query, problem.key, problem.value)
    ]
    found = cqs.distributed.attention(*shards, group=group, **options)
    output = found.output if isinstance(found, AttentionOutput) else found
    if needs_grad:
        (output,) = torch.autograd.grad(output.square().sum(), shards[0])
    return output.detach()


def compute(request, row, executor):
    """Return the output of a call, or the gradient of the query for the row ``gradients``."""
    options = dict(VALUES[row])
    if executor == "ranks":
        ranks = request.getfixturevalue("ranks")
        return torch.cat(ranks.run(3, on_rank, options, row == "gradients"), dim=2)
    given = tensors(row)
    if executor == "streaming":
        options.setdefault("memory_budget", 400_000)
    if executor.startswith("Ray"):
        cluster = request.getfixturevalue("cluster")
        if executor == "Ray tasks, `submit`":
            found = cluster.submit(*given, **options).result()
        elif executor == "Ray shards":
            sharded = cluster.attention(cluster.shard(*given), **options).to_local()
            found = sharded if torch.is_tensor(sharded) else AttentionOutput(*sharded)
        else:
            found = cluster.attention(*given, **options)
    else:
        found = FUNCTIONS[executor](*given, **options)
    output = found.output if isinstance(found, AttentionOutput) else found
    if row == "gradients":
        (output,) = torch.autograd.grad(output.square().sum(), given[0])
    return output.detach()


FILLED = [cell for cell in cells() if cell not in HOLES]
EMPTY = [cell for cell in cells() if cell in HOLES]


def marked(cells):
    marks = {True: [pytest.mark.ray], False: []}
    return [pytest.param(*c, marks=marks[c[1].startswith("Ray")], id="-".join(c)) for c in cells]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "executor"), marked(FILLED))
def test_every_filled_cell_is_exact(request, row, executor):
    exact = expected(row)
    if row == "gradients":
        leaves = tensors(row)
        (exact,) = torch.autograd.grad(cqs.attention(*leaves).square().sum(), leaves[0])
    found = compute(request, row, executor)
    torch.testing.assert_close(found, exact.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "executor"), marked(EMPTY))
def test_every_empty_cell_raises_an_error(request, row, executor):
    with pytest.raises((TypeError, ValueError, NotImplementedError, AssertionError)):
        compute(request, row, executor)


def test_the_table_has_every_argument():
    names = {name for executor in FUNCTIONS for name in parameters(executor)}
    rows = {row.partition(",")[0] for row in VALUES}
    assert names - rows == set(OWN) and rows - names == {"gradients"}


def test_the_table_is_up_to_date():
    text = PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    assert text == format_table()
