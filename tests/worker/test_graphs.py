"""CUDA graphs of calls on one GPU."""

import pytest
import torch

import cqs
from cqs.patterns import documents, sliding_window
from cqs.worker.triton import launch

pytestmark = pytest.mark.gpu

OPTIONS = {
    "causal": {"is_causal": True},
    "tasks": {"num_tasks": 7, "is_causal": True},
    "window": {"pattern": sliding_window(100)},
    "documents": {"pattern": documents([0, 31, 590, 1030])},
    "dropout": {"dropout_p": 0.3, "seed": 7},
}


def draw(dtype):
    return [
        torch.randn(2, heads, 1030, 64, dtype=dtype, device="cuda").requires_grad_()
        for heads in (8, 2, 2)
    ]


def attend(tensors, options):
    output = cqs.attention(*tensors, backend="triton", **options)
    return output.detach(), *torch.autograd.grad(output, tensors, output.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_replays_have_the_bits_of_calls(name, dtype):
    options, tensors = OPTIONS[name], draw(dtype)
    attend(tensors, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(tensors, options)
    launch._make_lists.__wrapped__.cache_clear()  # as if calls of many other sizes had followed
    for _ in range(3):
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_()
        expected = attend(tensors, options)
        other = [torch.randint(9, (1 << 20,), device="cuda") for _ in range(9)]
        graph.replay()
        assert all(map(torch.equal, results, expected))
        del other
