"""Ways to spread one attention problem over ranks, each as good as we know it, around one kernel.

A shard is ``[batch, heads, rows, dim]`` with rows first in memory, as projections give it to a
batch of one, and of as many rows on every rank: then tokens need no copy to travel, but between
heads. Whatever can travel beside a computation is launched before it.
"""
# ruff: noqa: D102, what methods do stands in Method

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cqs.distributed
from cqs.gradients import Gradients
from cqs.partial import Partial, lse_dtype, merge_rows
from cqs.problem import Problem
from cqs.scheduler import Step
from cqs.worker import HeldTokens, Worker

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the names of PyTorch 2.13, or by those before."""


class Method(ABC):
    """One way, as one rank sees it."""

    def __init__(self, group: Any, worker: Worker, *, is_causal: bool):
        """Take the process group, and what computes on every rank."""
        self.group, self.worker, self.is_causal = group, worker, is_causal
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def why_not(self, problem: Problem) -> str | None:
        """Say why this cannot take such a problem, or return None if it can."""
        return None

    @abstractmethod
    def tokens(self, seqlen: int) -> tuple[range, ...]:
        """Return the tokens of this rank's shard, in their order there."""

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of ``[batch, heads, seqlen, dim]``, if one range as a view."""
        parts = [_rows_first(whole)[r.start : r.stop] for r in self.tokens(whole.shape[2])]
        return _heads_first(parts[0] if len(parts) == 1 else torch.cat(parts))

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        """Return the output for the queries of a shard, and what the backward pass needs."""

    @abstractmethod
    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the shard; any number of times."""


class One(Method):
    """The first rank computes all, alone; the others have nothing."""

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return (range(0 if self.rank else seqlen),)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        if self.rank:
            return query, (query, key, value)
        answer = attend_alone(self.worker, query, key, value, is_causal=self.is_causal)
        return answer.output, (query, key, value, *answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        if self.rank:
            return tuple(saved)
        return differentiate_alone(self.worker, saved, grad_output, is_causal=self.is_causal)


class _Differentiable(Method):
    """What brings its own backward pass."""

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the output, differentiable."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        tensors = [tensor.detach() for tensor in (query, key, value)]
        for tensor in tensors:
            tensor.requires_grad_(torch.is_grad_enabled())
        output = self.attend(*tensors)
        return output.detach(), (output, tensors)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        output, tensors = saved
        found: tuple[Tensor, ...] = torch.autograd.grad(
            output, tensors, grad_output, retain_graph=True
        )
        return found


class Cqs(_Differentiable):
    """:func:`cqs.distributed.attention`: contiguous shards, which may differ in length."""

    def __init__(self, *arguments: Any, head_parallel: int | str = "auto", **options: Any):
        """Also take the number of slices of the heads."""
        super().__init__(*arguments, **options)
        self.head_parallel = head_parallel

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        first, stop = (seqlen * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return (range(first, stop),)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = cqs.distributed.attention(
            query,
            key,
            value,
            group=self.group,
            is_causal=self.is_causal,
            scale=self.worker.scale,
            head_parallel=self.head_parallel,
            backend=self.worker.backend,
        )
        assert isinstance(output, Tensor)
        return output


class _Chunked(Method):
    """Every rank has two of ``2 W`` equal chunks: neighbours, or if causal one from either end.

    With the second, the zig-zag, all ranks have equally many pairs that attend (Zhu, 2024,
    github.com/zhuzilin/ring-flash-attention).
    """

    def why_not(self, problem: Problem) -> str | None:
        if (seqlen := problem.query.shape[2]) % (2 * self.num_ranks):
            return f"needs tokens in multiples of {2 * self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return _ranges(self.chunks(self.rank), seqlen // (2 * self.num_ranks))

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the chunks that a rank has, in their order there."""
        if self.is_causal:
            return rank, 2 * self.num_ranks - 1 - rank
        return 2 * rank, 2 * rank + 1

    def call(self, query: Tensor, keys: Iterable[tuple[int, int]]) -> "Call | None":
        """Match this rank's queries with chunks of keys; see :func:`make_call`."""
        own = self.chunks(self.rank)
        return make_call(own, tuple(keys), query.shape[2] // 2, self.is_causal)

    def compute(
        self, call: "Call", query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Partial, slice]:
        """Compute a call; return the result for some of the queries, and which."""
        parts = query[:, :, call.rows], key[:, :, call.columns], value[:, :, call.columns]
        return self.worker.run_together(call.steps, *map(HeldTokens.whole, parts)), call.rows

    def differentiate(
        self, call: "Call", saved: Sequence[Tensor], grad_output: Tensor, key: Tensor, value: Tensor
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


class Ring(_Chunked):
    """Keys and values travel round a ring (Liu et al., arXiv 2310.01889), zig-zag if causal.

    Partial results are kept and merged once: that moves the fewest bytes, but holds an output per
    rank. In the backward pass the sums for the keys travel one rank behind them, in float32 but for
    the last hop, to where they are handed back.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        held = [_rows_first(key), _rows_first(value)]
        buffers = [list(map(torch.empty_like, held)) for _ in range(min(2, self.num_ranks - 1))]
        parts = []
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            coming = [] if is_last else buffers[hop % 2]
            transfers = self._pass_on([] if is_last else held, coming)
            parts.append(self.compute(self._call(query, hop), query, *map(_heads_first, held)))
            _wait(transfers)
            held = coming
        answer = _merge(parts)
        return answer.output, (query, key, value, *answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = saved
        held = [_rows_first(key), _rows_first(value)]
        buffers = [list(map(torch.empty_like, held)) for _ in range(min(2, self.num_ranks - 1))]
        grad_query, *sums = self._own_gradients(saved, grad_output, held, buffers)
        spare = list(map(torch.empty_like, sums))
        for hop in range(1, self.num_ranks):
            held = buffers[(hop - 1) % 2]
            is_last = hop == self.num_ranks - 1
            coming = [] if is_last else buffers[hop % 2]
            transfers = self._pass_on([*([] if is_last else held), *sums], [*coming, *spare])
            call = self._call(query, hop)
            found = self.differentiate(call, saved, grad_output, *map(_heads_first, held))
            grad_query[:, :, call.rows] += found.query
            _wait(transfers)
            sums, spare = spare, sums
            for total, part in zip(sums, found[1:], strict=True):
                total[:, :, call.columns] += part
        rounded = [total.to(query.dtype) for total in sums]
        if self.num_ranks > 1:
            home = list(map(torch.empty_like, rounded))
            _wait(self._pass_on(rounded, home))
            rounded = home
        return grad_query.to(query.dtype), *rounded

    def _own_gradients(
        self, saved: Any, grad_output: Tensor, held: list[Tensor], buffers: list[list[Tensor]]
    ) -> Gradients:
        """Compute those of the pairs within the shard, while the keys set off."""
        transfers = self._pass_on(held, buffers[0]) if buffers else []
        found = self.differentiate(
            self._call(saved[0], 0), saved, grad_output, *map(_heads_first, held)
        )
        _wait(transfers)
        return found

    def _call(self, query: Tensor, hop: int) -> "Call":
        """Match the queries with the keys that are here after so many hops."""
        call = self.call(query, enumerate(self.chunks((self.rank - hop) % self.num_ranks)))
        assert call is not None
        return call

    def _pass_on(self, going: list[Tensor], coming: list[Tensor]) -> list[dist.Work]:
        """Send tensors to the next rank, and receive into others from the previous one."""
        following, previous = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        sends = [dist.P2POp(dist.isend, t, group=self.group, group_peer=following) for t in going]
        receipts = [
            dist.P2POp(dist.irecv, t, group=self.group, group_peer=previous) for t in coming
        ]
        return dist.batch_isend_irecv(sends + receipts) if sends else []


class AllGather(_Chunked):
    """Every rank gathers all keys and values; gradients of keys are reduced and scattered.

    As in the training of Llama 3 (arXiv 2407.21783), but overlapped: the rank's own keys are
    attended to while the others come. In the backward pass they come again; the second half of the
    own keys, if causal the one that fewer see, is computed meanwhile, the first while the sums
    travel, in float32.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        gathered, transfers = self._gather(key, value)
        own, rest = self._own(query), self._rest(query)
        parts = [self.compute(own, query, key, value)]
        _wait(transfers)
        if rest:
            parts.append(self.compute(rest, query, *gathered))
        answer = _merge(parts)
        return answer.output, (query, key, value, *answer)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = saved
        gathered, transfers = self._gather(key, value)
        first, second = (self._own(query, [half]) for half in (0, 1))
        of_second = self.differentiate(second, saved, grad_output, key, value)
        _wait(transfers)
        batch, num_kv_heads, num_rows, head_dim = key.shape
        packed = of_second.key.new_zeros(
            (self.num_ranks * num_rows, batch, 2 * num_kv_heads, head_dim)
        )
        found = [(second, of_second)]
        if rest := self._rest(query):
            of_rest = self.differentiate(rest, saved, grad_output, *gathered)
            heads = _heads_first(packed)[:, :, rest.columns].split(num_kv_heads, dim=1)
            for target, part in zip(heads, of_rest[1:], strict=True):
                target.copy_(part)
            found.append((rest, of_rest))
        sums = packed.new_empty((num_rows, *packed.shape[1:]))
        transfer = _reduce_scatter(sums, packed, group=self.group, async_op=True)
        of_first = self.differentiate(first, saved, grad_output, key, value)
        grad_query = of_first.query  # of all rows
        for call, gradients in found:
            grad_query[:, :, call.rows] += gradients.query
        transfer.wait()
        grads = _heads_first(sums).split(num_kv_heads, dim=1)
        for call, gradients in ((first, of_first), (second, of_second)):
            for total, part in zip(grads, gradients[1:], strict=True):
                total[:, :, call.columns] += part
        return tuple(gradient.to(query.dtype) for gradient in (grad_query, *grads))

    def _gather(self, *shards: Tensor) -> tuple[list[Tensor], list[dist.Work]]:
        sources = list(map(_rows_first, shards))
        gathered = [t.new_empty((self.num_ranks * len(t), *t.shape[1:])) for t in sources]
        transfers = [
            _all_gather(*pair, group=self.group, async_op=True)
            for pair in zip(gathered, sources, strict=True)
        ]
        return list(map(_heads_first, gathered)), transfers

    def _own(self, query: Tensor, halves: Sequence[int] = (0, 1)) -> "Call":
        """Match the queries with the keys of the shard, or with half of them."""
        chunks = self.chunks(self.rank)
        call = self.call(query, [(half, chunks[half]) for half in halves])
        assert call is not None
        return call

    def _rest(self, query: Tensor) -> "Call | None":
        """Match the queries with the keys of all other shards."""
        chunks = [chunk for rank in range(self.num_ranks) for chunk in self.chunks(rank)]
        own = self.chunks(self.rank)
        return self.call(query, [pair for pair in enumerate(chunks) if pair[1] not in own])


class Ulysses(Method):
    """A rank computes all tokens of some heads (Jacobs et al., arXiv 2309.14509).

    Fewer key heads than ranks are repeated. The backward pass starts from what the ranks held, so
    that only gradients travel.
    """

    def __init__(self, *arguments: Any, num_parts: int = 1, **options: Any):
        """Also take into how many parts to cut the heads: of one heads travel beside another."""
        super().__init__(*arguments, **options)
        self.num_parts = num_parts

    def why_not(self, problem: Problem) -> str | None:
        (_, num_heads, seqlen, _), num_kv_heads = problem.query.shape, problem.key.shape[1]
        numbers = num_heads, max(num_kv_heads, self.num_ranks)
        if any(number % (self.num_ranks * self.num_parts) for number in numbers):
            return (
                f"needs heads in multiples of {self.num_ranks * self.num_parts}, "
                f"got {num_heads} of queries and {num_kv_heads} of keys"
            )
        if num_kv_heads < self.num_ranks and self.num_ranks % num_kv_heads:
            return f"needs key heads that divide {self.num_ranks} ranks, got {num_kv_heads}"
        if seqlen % self.num_ranks:
            return f"needs tokens in multiples of {self.num_ranks}, got {seqlen}"
        return None

    def tokens(self, seqlen: int) -> tuple[range, ...]:
        return _ranges([self.rank], seqlen // self.num_ranks)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        times = max(self.num_ranks // key.shape[1], 1)
        tensors = [query, *(_repeat_heads(tensor, times) for tensor in (key, value))]
        coming = [self._send_rows(tensors, part) for part in range(self.num_parts)]
        saved, going = [], []
        for transfer in coming:
            held = transfer.wait()
            answer = attend_alone(self.worker, *held, is_causal=self.is_causal)
            going.append(self._send_heads([answer.output]))
            saved.append((*held, *answer))
        (output,) = self._receive(going)
        return output, (saved, times)

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        parts, times = saved
        coming = [self._send_rows([grad_output], part) for part in range(self.num_parts)]
        going = []
        for transfer, held in zip(coming, parts, strict=True):
            (grad,) = transfer.wait()
            found = differentiate_alone(self.worker, held, grad, is_causal=self.is_causal)
            going.append(self._send_heads(found))
        grad_query, *grads = self._receive(going)
        return grad_query, *(_sum_heads(gradient, times) for gradient in grads)

    def _send_rows(self, tensors: Sequence[Tensor], part: int) -> "_Transfer":
        """Send every rank the rows of a part of its heads; all tokens of ours come."""
        pieces = [self._heads_of_ranks(tensor)[:, :, :, part].movedim(2, 0) for tensor in tensors]
        return self._exchange(pieces)

    def _send_heads(self, tensors: Sequence[Tensor]) -> "_Transfer":
        """Send every rank its rows of what was computed of some heads; those of all heads come."""
        ranks = self.num_ranks, -1
        return self._exchange([_rows_first_view(tensor).unflatten(0, ranks) for tensor in tensors])

    def _exchange(self, pieces: Sequence[Tensor]) -> "_Transfer":
        """Send tensors ``[ranks, rows, batch, heads, dim]``, joined at the heads."""
        heads = [piece.shape[3] for piece in pieces]
        packed = pieces[0].new_empty((*pieces[0].shape[:3], sum(heads), pieces[0].shape[4]))
        for target, piece in zip(packed.split(heads, dim=3), pieces, strict=True):
            target.copy_(piece)
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, packed, group=self.group, async_op=True)
        return _Transfer(work, packed, received, heads)

    def _receive(self, going: Sequence["_Transfer"]) -> list[Tensor]:
        """Put together the rows that come home, of all heads."""
        received = going[0].received
        _, *sizes, _, head_dim = received.shape
        targets = [
            received.new_empty((*sizes, self.num_ranks * self.num_parts * heads, head_dim))
            for heads in going[0].heads
        ]
        for part, transfer in enumerate(going):
            transfer.work.wait()
            pieces = transfer.received.split(transfer.heads, dim=3)
            for target, piece in zip(targets, pieces, strict=True):
                of_part = self._heads_of_ranks(_heads_first(target))[:, :, :, part]
                of_part.copy_(piece.movedim(0, 2))
        return list(map(_heads_first, targets))

    def _heads_of_ranks(self, tensor: Tensor) -> Tensor:
        """View a shard as ``[rows, batch, ranks, parts, heads, dim]``."""
        view: Tensor = _rows_first_view(tensor).unflatten(2, (self.num_ranks, self.num_parts, -1))
        return view


class Torch(_Chunked, _Differentiable):
    """PyTorch's context parallelism, a prototype, with its own zig-zag if causal.

    Its kernel is cuDNN's, since it cannot take ours, and partial results are merged by PyTorch's
    operators. Tensors are contiguous, which it would make them otherwise.
    """

    def __init__(self, *arguments: Any, rotate: str = "allgather", **options: Any):
        """Also take how keys travel: ``"allgather"``, its default, or ``"alltoall"``."""
        super().__init__(*arguments, **options)
        self.rotate = rotate

    def why_not(self, problem: Problem) -> str | None:
        if not problem.query.is_cuda:
            return "needs GPUs"
        if reason := super().why_not(problem):
            return reason
        tokens = 256 * self.num_ranks
        trial = [self.shard(t[:, :, :tokens]) for t in (problem.query, problem.key, problem.value)]
        try:
            with torch.enable_grad():
                output, saved = self.forward(*trial)
            self.backward(saved, output)
        except Exception as error:  # whatever a prototype may raise
            return f"fails: {error!r}"
        return None

    def shard(self, whole: Tensor) -> Tensor:
        return super().shard(whole).contiguous()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._set_options()
        output: Tensor = _context_parallel_attention(self.num_ranks)(
            query,
            key,
            value,
            is_causal=self.is_causal,
            scale=self.worker.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output

    def backward(self, saved: Any, grad_output: Tensor) -> tuple[Tensor, ...]:
        self._set_options()
        return super().backward(saved, grad_output)

    def _set_options(self) -> None:
        """Set what is global in PyTorch."""
        from torch.distributed.tensor.experimental._context_parallel import _attention

        _attention._cp_options.enable_load_balance = self.is_causal
        _attention.set_rotate_method(self.rotate)


METHODS: dict[str, Callable[..., Method]] = {
    "one": One,
    "cqs": Cqs,
    "cqs quorums": partial(Cqs, head_parallel=1),
    "ring": Ring,
    "all-gather": AllGather,
    "ulysses": Ulysses,
    "ulysses in two": partial(Ulysses, num_parts=2),
    "torch": Torch,
    "torch all-to-all": partial(Torch, rotate="alltoall"),
}
"""By name, what makes one from a group, a worker and ``is_causal``."""


class Call(NamedTuple):
    """Which of some queries see which of some keys, between the first and the last that do."""

    rows: slice
    columns: slice
    steps: tuple[Step, ...]
    """In these rows and columns; every row sees a column."""


@lru_cache(maxsize=256)
def make_call(
    queries: tuple[int, ...], keys: tuple[tuple[int, int], ...], length: int, is_causal: bool
) -> Call | None:
    """Match chunks of queries with the chunks of keys that they see.

    Args:
        queries: Numbers of the chunks that a tensor of queries holds, ascending.
        keys: Place in a tensor of keys, and number, of every chunk that may be seen.
        length: Tokens of a chunk.
        is_causal: Whether a chunk sees only itself, causally, and those before it.

    Returns:
        ``None`` if no chunk sees any.

    Example:
        >>> call = make_call((1, 6), ((0, 2), (1, 5)), 10, True)
        >>> call.rows, call.columns
        (slice(10, 20, None), slice(0, 20, None))
        >>> call.steps[0].queries, call.steps[0].keys
        (range(0, 10), (range(0, 20),))
    """
    full = [[place for place, n in keys if n < chunk or not is_causal] for chunk in queries]
    diagonal = [[place for place, n in keys if n == chunk and is_causal] for chunk in queries]
    seen = [place for places in full + diagonal for place in places]
    if not seen:
        return None
    first, last = min(seen), max(seen)
    blind = sum(not (each or own) for each, own in zip(full, diagonal, strict=True))
    steps = []
    for row in range(blind, len(queries)):
        (rows,) = _ranges([row - blind], length)
        squares = _ranges((place - first for place in diagonal[row]), length)
        pairs = len(full[row]) * length**2 + len(squares) * length * (length + 1) // 2
        columns = _ranges((place - first for place in full[row]), length)
        steps.append(Step(row, rows, columns, squares[0] if squares else None, pairs))
    return Call(
        slice(blind * length, len(queries) * length),
        slice(first * length, (last + 1) * length),
        tuple(steps),
    )


def attend_alone(
    worker: Worker, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
) -> Partial:
    """Attend with all tokens of some heads."""
    held = map(HeldTokens.whole, (query, key, value))
    return worker.run_together(_whole(query.shape[2], is_causal), *held)


def differentiate_alone(
    worker: Worker, saved: Sequence[Tensor], grad_output: Tensor, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Compute the gradients of some heads, in the dtype of the query.

    Args:
        worker: What computes.
        saved: Query, key, value, output and lse.
        grad_output: Of the output.
        is_causal: As in the forward pass.
    """
    query, key, value, *answer = saved
    held = map(HeldTokens.whole, (query, key, value, grad_output, *answer))
    steps = _whole(query.shape[2], is_causal)
    found = worker.run_backward(steps, *held, dtype=query.dtype)
    return tuple(gradient.to(query.dtype) for gradient in found)


class _Transfer(NamedTuple):
    """An exchange under way, and what must live as long."""

    work: dist.Work
    packed: Tensor
    received: Tensor
    heads: list[int]

    def wait(self) -> tuple[Tensor, ...]:
        """Return what came, as ``[batch, heads, seqlen, dim]``."""
        self.work.wait()
        return torch.split(_heads_first(self.received.flatten(0, 1)), self.heads, dim=1)


class _Attention(torch.nn.Module):
    """What PyTorch makes context-parallel."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            output: Tensor = F.scaled_dot_product_attention(query, key, value, **options)
        return output


@lru_cache(maxsize=1)
def _context_parallel_attention(num_ranks: int) -> torch.nn.Module:
    """Return attention over shards by PyTorch, for the default group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.distributed.tensor.parallel import parallelize_module

    _attention._enable_context_parallel_dispatcher()
    kind = _attention._ContextParallel.AttentionType.SDPA
    style = _attention._ContextParallel(seq_dim=2, attention_type=kind)
    return parallelize_module(_Attention(), init_device_mesh("cuda", (num_ranks,)), style)


def _whole(seqlen: int, is_causal: bool) -> tuple[Step, ...]:
    """Return the step in which all tokens see each other, or those before them."""
    tokens = range(seqlen)
    if is_causal:
        return (Step(0, tokens, (), tokens, seqlen * (seqlen + 1) // 2),)
    return (Step(0, tokens, (tokens,), None, seqlen**2),)


def _merge(parts: list[tuple[Partial, slice]]) -> Partial:
    """Merge partial results, of which the first has all rows."""
    (first, _), *others = parts
    if not others:
        return first
    answer = Partial(*map(torch.empty_like, first))
    merge_rows(answer, parts)
    return answer


def _ranges(chunks: Iterable[int], length: int) -> tuple[range, ...]:
    """Return the rows of chunks, neighbours joined.

    Example:
        >>> _ranges([0, 1, 3], 10)
        (range(0, 20), range(30, 40))
    """
    found: list[range] = []
    for chunk in chunks:
        start = chunk * length
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(range(start, (chunk + 1) * length))
    return tuple(found)


def _rows_first(tensor: Tensor) -> Tensor:
    """Return ``[rows, batch, heads, dim]`` in one piece: a view of a shard."""
    return _rows_first_view(tensor).contiguous()


def _rows_first_view(tensor: Tensor) -> Tensor:
    return tensor.movedim(2, 0)


def _heads_first(tensor: Tensor) -> Tensor:
    """View ``[rows, batch, heads, dim]`` as ``[batch, heads, rows, dim]``."""
    return tensor.movedim(0, 2)


def _repeat_heads(tensor: Tensor, times: int) -> Tensor:
    if times == 1:
        return tensor
    return _heads_first(_rows_first_view(tensor).repeat_interleave(times, dim=2))


def _sum_heads(tensor: Tensor, times: int) -> Tensor:
    """Add the gradients of repeated heads."""
    if times == 1:
        return tensor
    total: Tensor = tensor.unflatten(1, (-1, times)).sum(2, dtype=lse_dtype(tensor.dtype))
    return total.to(tensor.dtype)


def _wait(transfers: Iterable[dist.Work]) -> None:
    for transfer in transfers:
        transfer.wait()
