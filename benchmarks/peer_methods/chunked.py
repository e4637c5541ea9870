"""Methods whose ranks keep their queries and receive chunks of keys and values."""
# ruff: noqa: D102, Method documents the methods

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peer_methods.kernel_calls import KernelCall, RowViews, make_kernel_call
from benchmarks.peer_methods.method import Method
from cqs.partial import Gradients, Partial, merge_rows
from cqs.patterns.bound_documents import BoundDocuments
from cqs.patterns.piece import FAR
from cqs.patterns.views import View
from cqs.problem import Problem
from cqs.scheduler import Step
from cqs.scheduler.task import join_ranges
from cqs.worker import HeldTokens, Worker

Places = tuple[tuple[int, int], ...]
"""Position in a tensor of keys, and index, of every chunk of keys; both ascending by rank."""


class Chunked(Method):
    """Every rank has two of ``2 W`` equal chunks: adjacent ones, or if causal one from each end.

    The second order, zig-zag, gives all ranks equally many live pairs (Zhu, 2024,
    github.com/zhuzilin/ring-flash-attention). Packed documents are each cut into ``2 W`` chunks, as
    in that repository and in Transformer Engine; or the whole sequence is, as in the training of
    Llama 3, where ranks may differ in live pairs.
    """

    def __init__(self, *arguments: Any, cuts_documents: bool = True) -> None:
        """Also take whether packed documents are cut one by one."""
        super().__init__(*arguments)
        self.worker, self._calls = (
            Worker(self.problem.scale, self.backend),
            dict[Places, KernelCall | None](),
        )
        pattern, seqlen = self.problem.pattern, self.problem.query.shape[2]
        bound = None if self.problem.differs_by_head or pattern is None else pattern.bind(seqlen)
        is_packed = isinstance(bound, BoundDocuments) and bound.is_causal
        self.documents: Any = bound if is_packed else None
        """Packed documents, which are causal, or ``None``."""
        self.is_whole = not cuts_documents
        self.cuts_documents = cuts_documents and self.documents is not None

    def why_not(self) -> str | None:
        if self.is_whole and self.documents is None:
            return "requires packed documents, which it does not cut one by one"
        number, parts = 2 * self.num_ranks, self.parts(self.problem.query.shape[2])
        for part in parts:
            if len(part) % number:
                what = "documents" if self.cuts_documents else "tokens"
                return f"requires {what} in multiples of {number}, got {len(part)}"
        return None

    def parts(self, seqlen: int) -> list[range]:
        """Return the token ranges that are cut into ``2 W`` chunks each."""
        if not self.cuts_documents:
            return [range(seqlen)]
        return list(map(range, self.documents.starts.tolist(), self.documents.stops.tolist()))

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        chunks, parts = self.chunks(self.rank), self.parts(seqlen)
        lengths = [len(part) // (2 * self.num_ranks) for part in parts]
        return join_ranges(
            range(part.start + chunk * length, part.start + (chunk + 1) * length)
            for part, length in zip(parts, lengths, strict=True)
            for chunk in chunks
        )

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the indices of a rank's two chunks, in the order of its shard."""
        if self.problem.is_causal or self.documents is not None:
            return rank, 2 * self.num_ranks - 1 - rank
        return 2 * rank, 2 * rank + 1

    def call(self, query: Tensor, keys: Iterable[tuple[int, int]]) -> KernelCall | None:
        """Return the call of this rank's queries; see :func:`make_kernel_call`."""
        places, num_rows = tuple(keys), query.shape[2]
        if self.problem.pattern is None:
            own = self.chunks(self.rank)
            return make_kernel_call(own, places, num_rows // 2, self.problem.is_causal)
        if places not in self._calls:
            self._calls[places] = self._pattern_call(places, num_rows)
        return self._calls[places]

    def _pattern_call(self, places: Places, num_rows: int) -> KernelCall | None:
        """Return the call of all rows; the pattern is that of their positions."""
        views = [tuple(self._views(part, places, num_rows)) for _, part in self.problem.parts()]
        if not any(views):
            return None
        assert all(views), "every head must have a live pair in every call"
        rows, columns = range(num_rows), range((places[-1][0] // 2 + 1) * num_rows)
        step = Step(0, rows, (columns,), None, len(rows) * len(columns))
        patterns = (RowViews(len(rows), len(columns), each) for each in views)
        return KernelCall(slice(len(rows)), slice(len(columns)), (step,), tuple(patterns))

    def _views(self, part: Problem, places: Places, num_rows: int) -> Iterator[View]:
        """Yield the live pairs of this rank's queries and of chunks of keys, by rows."""
        own = self.chunks(self.rank)
        if self.cuts_documents:
            for document in self.parts(num_rows * self.num_ranks):
                yield from self._document_views(document, places, num_rows)
            return
        assert part.bound_pattern is not None
        length = num_rows // 2
        for (half, chunk), (place, key_chunk) in product(enumerate(own), places):
            tokens = (range(n * length, (n + 1) * length) for n in (chunk, key_chunk))
            for view in part.bound_pattern.views(*tokens):
                yield view.moved((half - chunk) * length, (place - key_chunk) * length)

    def _document_views(self, document: range, places: Places, num_rows: int) -> Iterator[View]:
        """Yield one view for the keys of each rank.

        A rank's second chunk sees all chunks of later ranks, and both its chunks see the first
        ones of earlier ranks. Its own rows are a causal square.
        """
        own, length = self.chunks(self.rank), len(document) // (2 * self.num_ranks)
        row = document.start // self.num_ranks
        for source, group in groupby(places, lambda pair: pair[0] // 2):
            seen = [(place % 2, chunk) for place, chunk in group if chunk <= own[1]]
            (half, first), (last, _) = seen[0], seen[-1]
            queries = range(row + length * (first > own[0]), row + 2 * length)
            column = source * num_rows + row
            keys = range(column + half * length, column + (last + 1) * length)
            yield View(queries, keys, high=0 if first in own else FAR)

    def compute(
        self, call: KernelCall, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Partial, slice]:
        """Compute a call; return partial outputs, and the rows that they belong to."""
        parts = query[:, :, call.rows], key[:, :, call.columns], value[:, :, call.columns]
        found = [
            worker.run_together(call.steps, *map(HeldTokens.whole, held))
            for worker, held in self._by_head(call, parts)
        ]
        return Partial(*_join_heads(found)), call.rows

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
        found = [
            worker.run_backward(call.steps, *map(HeldTokens.whole, held))
            for worker, held in self._by_head(call, parts)
        ]
        return Gradients(*_join_heads(found))

    def _by_head(
        self, call: KernelCall, tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Worker, list[Tensor]]]:
        """Yield the heads of every pattern, which must have KV heads of their own, and a worker."""
        for ((_, heads), _), pattern in zip(self.problem.cuts(), call.patterns, strict=True):
            yield replace(self.worker, pattern=pattern), [each[:, heads] for each in tensors]


def _join_heads(parts: Sequence[Iterable[Tensor]]) -> list[Tensor]:
    return [one[0] if len(one) == 1 else torch.cat(one, dim=1) for one in zip(*parts, strict=True)]


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
