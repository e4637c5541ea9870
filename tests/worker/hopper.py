"""Masks, work, tensors and exact gradients that tests of workers and kernels share."""

import numpy as np
import torch

from benchmarks.cases import visible_mask
from cqs.scheduler import make_plan
from cqs.worker.work import make_work

BF16, FP16 = torch.bfloat16, torch.float16


def plan_work(seqlen_q, seqlen_kv, *, num_tasks=1, distance=None, **options):
    """Return the work of all tasks of a plan on one device."""
    plan = make_plan(seqlen_q, seqlen_kv, num_tasks=num_tasks, **options)
    steps = tuple(step for task in plan.tasks for step in task.steps)
    pattern = options.get("pattern")
    bound = pattern and pattern.bind(seqlen_q, seqlen_kv)
    return make_work(steps, bound, (range(seqlen_q),), (range(seqlen_kv),), distance)


def mask_of(problem):
    """Return the live pairs of a problem, bool ``[queries, keys]``."""
    lengths = problem.query.shape[2], problem.key.shape[2]
    mask = visible_mask(problem)
    return torch.ones(lengths, device=problem.query.device).bool() if mask is None else mask


def count_pairs(work, lengths):
    """Return how often each pair is live, int64 ``[queries, keys]``."""
    count = np.zeros(lengths, np.int64)
    for block_row in work.block_rows:
        for view in block_row.views:
            count[np.ix_(view.queries, view.keys)] += view.to_mask()
    return count


def make_tensors(
    heads, queries, keys=None, kv_heads=None, dim=128, dtype=BF16, batch=1, is_transposed=False
):
    """Return query, key, value and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    query_shape, key_shape = (heads, queries), (kv_heads or heads, keys or queries)

    def make(num_heads, length):
        shape = (batch, length, num_heads) if is_transposed else (batch, num_heads, length)
        tensor = torch.randn(*shape, dim, generator=generator, device="cuda", dtype=dtype)
        return tensor.transpose(1, 2) if is_transposed else tensor

    return [make(*sizes) for sizes in (query_shape, key_shape, key_shape, query_shape)]


def exact_gradients(query, key, value, grad_output, scale, mask):
    """Return the gradients in float64; queries that see no key have gradient 0."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in leaves[1:])
    scores = leaves[0] @ keys.mT * scale
    blind = ~mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~mask & ~blind, -torch.inf).softmax(-1) * ~blind
    return torch.autograd.grad(weights @ values, leaves, grad_output.double())
