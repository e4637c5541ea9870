"""Ranks that keep their queries, to which keys and values come in chunks."""
# ruff: noqa: D102, what methods do stands in Method

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.calls import Call, join_chunks, make_call
from benchmarks.peer_methods.method import Method
from cqs.gradients import Gradients
from cqs.partial import Partial, merge_rows
from cqs.problem import Problem
from cqs.worker import HeldTokens


class Chunked(Method):
    """Every rank has two of ``2 W`` equal chunks: neighbours, or if causal one from either end.

    With the second, the zig-zag, all ranks have equally many pairs that attend (Zhu, 2024,
    github.com/zhuzilin/ring-flash-attention).
    """

    def why_not(self, problem: Problem) -> str | None:
        if (seqlen := problem.query.shape[2]) % (2 * self.num_ranks):
            return f"needs tokens in multiples of {2 * self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return join_chunks(self.chunks(self.rank), seqlen // (2 * self.num_ranks))

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the chunks that a rank has, in their order there."""
        if self.is_causal:
            return rank, 2 * self.num_ranks - 1 - rank
        return 2 * rank, 2 * rank + 1

    def call(self, query: Tensor, keys: Iterable[tuple[int, int]]) -> Call | None:
        """Match this rank's queries with chunks of keys; see :func:`make_call`."""
        own = self.chunks(self.rank)
        return make_call(own, tuple(keys), query.shape[2] // 2, self.is_causal)

    def compute(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Partial, slice]:
        """Compute a call; return the result for some of the queries, and which."""
        parts = query[:, :, call.rows], key[:, :, call.columns], value[:, :, call.columns]
        return self.worker.run_together(call.steps, *map(HeldTokens.whole, parts)), call.rows

    def differentiate(
        self, call: Call, saved: Sequence[Tensor], grad_output: Tensor, key: Tensor, value: Tensor
    ) -> Gradients:
        """Compute the gradients of a call's rows and columns."""
        query, _, _, output, lse = saved
        parts = [
            query[:, :, call.rows],
            key[:, :, call.columns],
            value[:, :, call.columns],
            *(tensor[:, :, call.rows] for tensor in (grad_output, output, lse)),
        ]
        return self.worker.run_backward(call.steps, *map(HeldTokens.whole, parts))


def merge_parts(parts: list[tuple[Partial, slice]]) -> Partial:
    """Merge partial results, of which the first has all rows."""
    (first, _), *others = parts
    if not others:
        return first
    answer = Partial(*map(torch.empty_like, first))
    merge_rows(answer, parts)
    return answer


def wait_for(transfers: Iterable[dist.Work]) -> None:
    """Wait for all; a GPU only holds back what is launched from now on."""
    for transfer in transfers:
        transfer.wait()
