"""ring-flash-attention and yunchang: the problems of their tests, on ranks of a process group.

Both print the deviation from one call on the whole sequence. Here the rule of
:func:`~.framework.assert_tracks` compares it with that of PyTorch's call in the same dtype.
"""

from functools import cache, partial
from itertools import pairwise, product

import torch
import torch.nn.functional as F

import cqs.distributed
from cqs.patterns import documents
from tests.distributed.ranks import Ranks
from tests.support.options import grouped

from .framework import Case, Suite, assert_tracks, heads_first

VERSIONS = "ring_flash_attn 0.1.8, yunchang 0.6.4"
RANKS = 4
_PROBLEMS = {
    "ring_flash_attn_func": {"length": 3816, "heads": 5, "head_dim": 128},
    "stripe and zigzag": {"length": 3824, "heads": 5, "head_dim": 128},
    "ring varlen": {"ends": [0, 120, 1248, 4232], "heads": 5, "head_dim": 128},
    "llama3 varlen": {"ends": [0, 120, 1248, 4232], "heads": 5, "head_dim": 8},
    "llama3 prepare": {"ends": [0, 7, 14, 16], "heads": 5, "head_dim": 8},
    "yunchang hybrid": {"length": 1024, "heads": 32, "head_dim": 64},
}


def suite():
    """Return the problems, causal and not, with and without head parallelism."""
    return Suite("ring attention", VERSIONS, _cases())


def _cases():
    for (name, problem), is_causal, degree in product(
        _PROBLEMS.items(), (True, False), ("auto", 1, 2)
    ):
        if degree == 2 and problem["heads"] % 2:
            continue
        options = {"is_causal": is_causal, "head_parallel": degree}
        yield Case(f"{name} {options}", partial(_check, problem, options))


def _check(problem, options):
    parts = _ranks().run(RANKS, _of_rank, problem, options)
    found = [torch.cat(each, 1) for each in zip(*parts, strict=True)]
    operands, gradient = _operands(problem)
    eager, exact = (_expected(problem, options, operands, gradient, each) for each in _DTYPES)
    assert_tracks(found, eager, exact, (0.016, 1e-5))


_DTYPES = torch.bfloat16, torch.float32


def _length(problem):
    return int(problem["ends"][-1] if "ends" in problem else problem["length"])


def _operands(problem):
    generator = torch.Generator().manual_seed(0)
    shape = 4, 1, _length(problem), problem["heads"], problem["head_dim"]
    query, key, value, gradient = torch.randn(shape, generator=generator).bfloat16()
    return [query, key, value], gradient


@cache
def _ranks():
    """Start the processes, which end with this one."""
    return Ranks(RANKS)


def _of_rank(group, problem, options):
    """Return output and gradients of a rank's tokens, ``[batch, tokens, heads, head_dim]``."""
    rank = group.rank()
    operands, gradient = _operands(problem)
    leaves = [each.tensor_split(RANKS, 1)[rank].requires_grad_() for each in operands]
    if "ends" in problem:
        options = options | {"pattern": documents(problem["ends"], is_causal=options["is_causal"])}
    output = heads_first(cqs.distributed.attention)(*leaves, group=group, **grouped(options))
    gradients = torch.autograd.grad(output, leaves, gradient.tensor_split(RANKS, 1)[rank])
    return [output.detach(), *gradients]


def _expected(problem, options, operands, gradient, dtype):
    """Compute each document by PyTorch."""
    leaves = [each.to(dtype).requires_grad_() for each in operands]
    ends = problem.get("ends", [0, _length(problem)])
    attend = partial(heads_first(F.scaled_dot_product_attention), is_causal=options["is_causal"])
    outputs = [attend(*(each[:, start:stop] for each in leaves)) for start, stop in pairwise(ends)]
    output = torch.cat(outputs, 1)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))]
