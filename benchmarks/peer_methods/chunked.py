"""Methods whose ranks keep their queries and receive chunks of keys and values."""
# ruff: noqa: D102, Method documents the methods

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.kernel_calls import KernelCall, join_chunks, make_kernel_call
from benchmarks.peer_methods.method import Method
from cqs.partial import Gradients, Partial, merge_rows
from cqs.problem import Problem
from cqs.worker import HeldTokens


class Chunked(Method):
    """Every rank has two of ``2 W`` equal chunks: adjacent ones, or if causal one from each end.

    The second order, zig-zag, gives all ranks equally many live pairs (Zhu, 2024,
    github.com/zhuzilin/ring-flash-attention).
    """

    def why_not(self, problem: Problem) -> str | None:
        if (seqlen := problem.query.shape[2]) % (2 * self.num_ranks):
            return f"requires tokens in multiples of {2 * self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return join_chunks(self.chunks(self.rank), seqlen // (2 * self.num_ranks))

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the indices of a rank's two chunks, in the order of its shard."""
        if self.is_causal:
            return rank, 2 * self.num_ranks - 1 - rank
        return 2 * rank, 2 * rank + 1

    def call(self, query: Tensor, keys: Iterable[tuple[int, int]]) -> KernelCall | None:
        """Return the call of this rank's queries; see :func:`make_kernel_call`."""
        own = self.chunks(self.rank)
        return make_kernel_call(own, tuple(keys), query.shape[2] // 2, self.is_causal)

    def compute(
        self, call: KernelCall, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Partial, slice]:
        """Compute a call; return partial outputs, and the rows that they belong to."""
        parts = query[:, :, call.rows], key[:, :, call.columns], value[:, :, call.columns]
        return self.worker.run_together(call.steps, *map(HeldTokens.whole, parts)), call.rows

    def differentiate(
        self,
        call: KernelCall,
        saved: Sequence[Tensor],
        grad_output: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Gradients:
        """Compute the gradients of a call, for its rows and columns."""
        query, _, _, output, lse = saved
        parts = [
            query[:, :, call.rows],
            key[:, :, call.columns],
            value[:, :, call.columns],
            *(tensor[:, :, call.rows] for tensor in (grad_output, output, lse)),
        ]
        return self.worker.run_backward(call.steps, *map(HeldTokens.whole, parts))


def merge_parts(parts: list[tuple[Partial, slice]]) -> Partial:
    """Merge partial outputs; the first one has all rows."""
    (first, _), *others = parts
    if not others:
        return first
    answer = Partial(*map(torch.empty_like, first))
    merge_rows(answer, parts)
    return answer


def wait_for(transfers: Iterable[dist.Work]) -> None:
    """Wait for transfers; on GPUs only work launched after this waits, not the host."""
    for transfer in transfers:
        transfer.wait()
