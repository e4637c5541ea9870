"""Every method that ``python -m benchmarks peers`` times is attention, forward and backward."""

import json
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.exact import exact_answer

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.cases import Case
from benchmarks.peer_methods import METHODS
from benchmarks.peer_methods.ring import Ring
from cqs.executors.verify import VerificationError
from cqs.patterns import block_sparse, documents, sliding_window

pytestmark = pytest.mark.long

LAYOUT = torch.eye(12) + torch.rand(24, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.5
CASES = (
    Case("square", 48, 48, num_heads=24, num_kv_heads=24, batch=2),
    Case("gqa", 48, 48, num_heads=48, num_kv_heads=24, is_causal=True),
    Case("few-key-heads", 48, 48, num_heads=24, num_kv_heads=2, is_causal=True),
    Case("documents", 96, 96, 48, 24, pattern=documents([0, 24, 48, 96])),
    Case("window", 96, 96, 24, 24, pattern=sliding_window(20, 40)),
    Case("blocks", 96, 96, 24, 24, 4, pattern=block_sparse(LAYOUT, 8)),
)
FEW_HEADS = {2: {"ulysses in two"}, 3: {"ulysses", "ulysses in two"}, 4: {"ulysses in two"}}


def largest_errors(group, case):
    """Return each method's largest float64 error on this rank, or why it is not supported."""
    problem = case.make(torch.float64)
    tensors = [t.requires_grad_() for t in (problem.query, problem.key, problem.value)]
    exact = exact_answer(problem).output
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    whole = exact, *torch.autograd.grad(exact, tensors, grad)
    found = {}
    for name, make in METHODS.items():
        method = make(group, problem)
        if reason := method.why_not():
            found[name] = reason
            continue
        shard = [method.shard(tensor.detach()) for tensor in tensors]
        output, saved = method.forward(*shard)
        for _ in range(2):  # the second finds what the first did not spoil
            gradients = method.backward(saved, method.shard(grad))
        if method.tokens(case.seqlen_q) == (range(0),):
            found[name] = 0.0
            continue
        pairs = zip((output, *gradients), map(method.shard, whole), strict=True)
        found[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_method_is_exact(ranks, num_ranks, case):
    refused = {"ulysses padded", "torch"}
    refused |= set() if case.name == "documents" else {"all-gather whole"}
    refused |= {"ring"} if case.name in ("window", "blocks") else set()
    refused |= FEW_HEADS.get(num_ranks, set()) if case.name == "few-key-heads" else set()
    for found in ranks.run(num_ranks, largest_errors, case):
        assert {name for name, error in found.items() if isinstance(error, str)} == refused
        assert max(error for error in found.values() if isinstance(error, float)) < 1e-12


def test_what_a_method_cannot_take_is_left_out_with_the_reason(ranks):
    (found, _) = ranks.run(2, largest_errors, Case("uneven", 51, 51, 3, 3))
    assert found["ring"] == found["all-gather"] == "requires tokens in multiples of 4, got 51"
    assert found["ulysses"] == "requires heads in multiples of 2, got 3 query heads and 3 KV heads"
    assert found["cqs limited"] == "requires tokens in multiples of 2, got 51"
    assert found["cqs"] < 1e-12


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_padded_heads_are_exact(ranks, num_ranks):
    case = Case("odd-heads", 48, 48, num_heads=3, num_kv_heads=3, is_causal=True)
    for found in ranks.run(num_ranks, largest_errors, case):
        assert found["ulysses padded"] < 1e-12


class Forgetful(Ring):
    """Loses what one rank computes of the second half of its queries alone."""

    def compute(self, call, *tensors):
        partial, rows = super().compute(call, *tensors)
        if self.rank == 1 and rows.start:
            partial.lse.fill_(-torch.inf)
        return partial, rows


def measured(group, out, wrong):
    """Return the rows of a small benchmark, or what it raises."""
    problem = Case("peers", 48, 48, 4, 2, is_causal=True).make()
    grad = torch.randn(problem.query.shape, generator=torch.Generator().manual_seed(0))
    with patch.dict(METHODS, ring=Forgetful if wrong else Ring):
        try:
            return peers.measure(group, list(METHODS), problem, grad, repeats=2, out=out)
        except VerificationError as error:
            return str(error)


def test_rows_are_kept_by_the_first_rank(ranks, tmp_path):
    out = tmp_path / "rows.jsonl"
    rows, *others = ranks.run(4, measured, str(out), False)
    assert others == [[]] * 3
    names = {"one", "cqs", "cqs quorums", "cqs limited", "ring", "grid", "all-gather", "ulysses"}
    for what in ("forward", "both"):
        assert {row.executor for row in rows if row.benchmark == f"peers {what}"} == names
    assert {row.details["balance"] for row in rows if row.executor in ("ring", "ulysses")} == {1}
    (one, *_) = rows
    assert one.ratio == 1 and one.details["efficiency"] == 1 and one.details["ranks"] == 4
    written = [json.loads(line)["executor"] for line in out.read_text().splitlines()]
    assert written == [row.executor for row in rows]


def test_a_wrong_method_stops_every_rank(ranks):
    first, *others = ranks.run(3, measured, None, True)
    assert "ring: " in first and others == [first] * 2


def test_fewer_than_two_tokens_for_each_rank_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["peers", "--seqlen", "16,7"]) == 2
    assert capsys.readouterr().err.endswith(" tokens must be at least 8, got 7\n")
    assert not dist.is_initialized()
