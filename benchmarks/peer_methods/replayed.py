"""The method of :mod:`cqs.distributed`, replayed from CUDA graphs."""
# ruff: noqa: D102, Method documents the methods

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer_methods.quorums import Cqs
from cqs.problem import Problem


class Replayed(Cqs):
    """The same calls, captured once, for the tensors of the first call only."""

    def __init__(self, *arguments: Any, **options: Any):
        """Take the arguments of :class:`Cqs`; the first call captures."""
        super().__init__(*arguments, **options)
        self._replay: dict[bool, Callable[..., Tensor]] = {}

    def why_not(self, problem: Problem) -> str | None:
        return None if problem.query.is_cuda else "requires GPUs"

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with_gradients = torch.is_grad_enabled()
        if with_gradients not in self._replay:
            capture: Any = torch.cuda.make_graphed_callables if with_gradients else _capture
            self._replay[with_gradients] = capture(super().attend, (query, key, value))
        return self._replay[with_gradients](query, key, value)


def _capture(attend: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Return a function that replays the forward pass."""
    attend(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(*tensors)

    def replay(*_: Tensor) -> Tensor:
        graph.replay()
        return output

    return replay
