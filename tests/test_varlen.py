"""Packed documents of unequal query and key lengths equal calls of FlashAttention's varlen form."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import complaint

import cqs
import cqs.streaming
from cqs.patterns import documents

ENDS_Q, ENDS_K = [0, 7, 7, 20, 50, 53], [0, 12, 16, 25, 25, 61]
"""Documents with fewer, more or no queries than keys, and one without keys."""


def operands():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, ENDS_Q[-1], 8), *[(1, 2, ENDS_K[-1], 8)] * 2]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def varlen(query, key, value, is_causal):
    """Output and LSE of each document alone, aligned at the bottom right; 0 without keys."""
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    outputs, lses = [], []
    for number in range(len(ENDS_Q) - 1):
        rows, columns = (slice(*ends[number : number + 2]) for ends in (ENDS_Q, ENDS_K))
        scores = query[:, :, rows] @ key[:, :, columns].mT * 8**-0.5
        if is_causal:
            visible = torch.ones(scores.shape[2:], dtype=bool).tril(
                scores.shape[3] - scores.shape[2]
            )
            scores = scores.masked_fill(~visible, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        outputs.append(weights @ value[:, :, columns])
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def results(attend, leaves):
    output, lse = attend(*leaves)
    gradient = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    return [output, lse, *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("call", ["local", "parts", "graph"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_documents_equal_varlen_calls(is_causal, call):
    torch._dynamo.reset()
    calls = {
        "local": partial(cqs.attention, num_tasks=5, verify=True),
        "parts": partial(cqs.streaming.attention, memory_budget=200_000, device="cpu"),
        "graph": torch.compile(cqs.attention, fullgraph=True, backend="aot_eager"),
    }
    ends = torch.tensor(ENDS_Q, dtype=torch.int32), torch.tensor(ENDS_K, dtype=torch.int32)
    options = {"pattern": documents(*ends, is_causal=is_causal), "return_lse": True}
    leaves = [each.requires_grad_() for each in operands()]
    found = results(partial(calls[call], **options), leaves)
    for got, want in zip(found, results(partial(varlen, is_causal=is_causal), leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def on_rank(group, is_causal):
    number, rank = dist.get_world_size(group), dist.get_rank(group)
    shards = [each.tensor_split(number, 2)[rank].clone().requires_grad_() for each in operands()]
    pattern = documents(ENDS_Q, ENDS_K, is_causal=is_causal)
    output = cqs.distributed.attention(*shards, pattern=pattern, group=group)
    return output.detach(), *torch.autograd.grad(output.square().sum(), shards)


@pytest.mark.parametrize("is_causal", [False, True])
def test_documents_of_ranks_equal_varlen_calls(ranks, is_causal):
    found = [torch.cat(each, 2) for each in zip(*ranks.run(3, on_rank, is_causal), strict=True)]
    leaves = [each.requires_grad_() for each in operands()]
    output = varlen(*leaves, is_causal)[0]
    expected = [output, *torch.autograd.grad(output.square().sum(), leaves)]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ends", [[0, 7, 30], [0, 20, 30], [0, 7, 12], [0]], ids=str)
def test_ends_beyond_or_before_the_last_token_are_named(ranks, ends):
    pattern, message = documents(ends), "must end at the 16 queries and 16 keys .*: make padding"
    tensors = [torch.randn(1, 4, 16, 8) for _ in range(3)]
    for call in (cqs.attention, partial(cqs.streaming.attention, memory_budget=200_000)):
        with pytest.raises(ValueError, match=message):
            call(*tensors, pattern=pattern)
    for error, text in ranks.run(2, complaint, 0, {}, {"pattern": pattern}):
        assert error is ValueError and re.search(message, text)
