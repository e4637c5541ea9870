"""``python -m benchmarks.profiled_call CASE PASS TOKENS``: one call for the profiler."""

import sys

import torch

import cqs
from benchmarks.patterns import draw_tensors, make_forms


def main(name: str, what: str, tokens: int) -> None:
    """Run one pass twice, the second time between the marks."""
    pattern = next(each.pattern for each in make_forms(tokens) if each.name == name)
    query, key, value = draw_tensors(tokens)
    grad_output = torch.randn_like(query)
    profiler = torch.cuda.cudart()

    for mark in (lambda: None, profiler.cudaProfilerStart):
        torch.cuda.synchronize()
        if what == "forward":
            mark()
        output = cqs.attention(query, key, value, pattern=pattern)
        torch.cuda.synchronize()
        if what == "backward":
            mark()
            torch.autograd.grad(output, (query, key, value), grad_output)
            torch.cuda.synchronize()
    profiler.cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
