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


def overlapping(row):
    """Return views whose rows share memory."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(1, 2, 88, generator=generator).unfold(2, 48, 1) for _ in range(3)]
    return [tensor.requires_grad_(row == "gradients") for tensor in found]


def expected(row):
    options = {name: VALUES[row][name] for name in MEANING if name in VALUES[row]}
    return cqs.attention(*tensors(row), **options)


def on_rank(group, options, row, make, device):
    """Compute on a rank; return its output, or the gradient of its query."""
    rank, number, needs_grad = dist.get_rank(group), dist.get_world_size(group), row == "gradients"
    shards = [
        tensor.detach().tensor_split(number, dim=2)[rank].requires_grad_(needs_grad)
        for tensor in make(row)
    ]
    with torch.device(device):
        found = cqs.distributed.attention(*shards, group=group, **options)
        output = found.output if isinstance(found, AttentionOutput) else found
        if needs_grad:
            (output,) = torch.autograd.grad(output.square().sum(), shards[0])
    return output.detach()


def compute(request, row, executor, make=tensors, device="cpu"):
    """Return the output of a call, or the gradient of the query for the row ``gradients``."""
    options = dict(VALUES[row])
    if executor == "ranks":
        ranks = request.getfixturevalue("ranks")
        return torch.cat(ranks.run(3, on_rank, options, row, make, device), dim=2)
    given = make(row)
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
        with torch.device(device):
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


def test_alibi_is_on_the_device_of_the_tensors():
    query, slopes = torch.randn(1, 2, 9, 8), torch.tensor([0.5, 0.25])
    scores = cqs.Scores(alibi_slopes=slopes)
    expected = cqs.attention(query, query, query, scores=scores)
    with torch.device("meta"):
        assert torch.equal(cqs.attention(query, query, query, scores=scores), expected)


@pytest.mark.slow
@pytest.mark.parametrize("row", VALUES)
@pytest.mark.parametrize("executor", ["this process", "ranks", "streaming"])
def test_the_default_device_is_no_matter(request, monkeypatch, row, executor):
    if (row, executor) in HOLES:
        pytest.skip(HOLES[row, executor])
    monkeypatch.setattr("cqs.partial._LEAST_ELEMENTS", 1)
    found, expected = (compute(request, row, executor, device=each) for each in ("meta", "cpu"))
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "executor"),
    marked(cell for cell in FILLED if cell[0] in ("gradients", "is_causal", "num_tasks")),
)
def test_rows_may_share_memory(request, row, executor):
    found = compute(request, row, executor, overlapping)
    exact = compute(
        request, row, "this process", lambda row: [t.double() for t in overlapping(row)]
    )
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-4)


OF_EMPTY_BATCHES = "gradients", "verify", "scores", "dropout_p", "pattern, one per head"


def without_elements(row):
    return [each.detach()[:0].requires_grad_(row == "gradients") for each in tensors(row)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "executor"), marked(cell for cell in FILLED if cell[0] in OF_EMPTY_BATCHES)
)
def test_an_empty_batch_is_empty(request, row, executor):
    found = compute(request, row, executor, without_elements)
    assert found.shape == tensors(row)[0][:0].shape


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
