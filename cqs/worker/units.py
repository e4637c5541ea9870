"""Computation in units, one task for one batch element and one KV head, apart from all others.

Kernels may round differently with the number of heads in a call, with strides, with the alignment
of memory and with the number of threads. On CPUs each step of a unit is therefore computed by
itself, in one thread, from contiguous copies of its tokens. The kernels for GPUs compute every tile
of every head by itself, so all heads take one launch; only their choice must not depend on heads.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from cqs.partial import Gradients, Partial
from cqs.scheduler import Step, Task
from cqs.scheduler.task import keys_of
from cqs.worker.backend import Backend, TaskBackend
from cqs.worker.backends import choose_backend
from cqs.worker.held_tokens import HeldTokens
from cqs.worker.worker import Worker

_BACKENDS = {"cpu": ("cpu", "reference"), "cuda": ("triton",)}
"""Device -> the backends whose results for a unit depend on the unit alone, the preferred first."""
AnyWorker = TypeVar("AnyWorker", bound=Worker)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Place(NamedTuple):
    """A batch element, and the heads of one or several units."""

    batch: int
    """Batch element."""
    kv_head: int
    """First KV head."""
    group_size: int
    """Query heads for each KV head."""
    num_kv_heads: int = 1
    """KV heads; more than one are those of several units."""

    @property
    def row(self) -> slice:
        """The batch element."""
        return slice(self.batch, self.batch + 1)

    @property
    def heads(self) -> tuple[slice, slice]:
        """Query heads, and KV heads."""
        first, stop, size = self.kv_head, self.kv_head + self.num_kv_heads, self.group_size
        return slice(first * size, stop * size), slice(first, stop)


def places_of(query: Tensor, key: Tensor) -> list[Place]:
    """Return batch elements and KV heads in the order of sums.

    Args:
        query: ``[batch, num_heads, ...]``.
        key: ``[batch, num_kv_heads, ...]``.
    """
    (batch, num_heads), num_kv_heads = query.shape[:2], key.shape[1]
    size = num_heads // num_kv_heads
    return [Place(*where, size) for where in product(range(batch), range(num_kv_heads))]


@dataclass(frozen=True)
class UnitWorker(Worker):
    """Computes tasks in units."""

    is_unit: ClassVar[bool] = True

    def choose_backend(
        self, query: Tensor, key: Tensor, value: Tensor, steps: Sequence[Step] = ()
    ) -> Backend:
        """Return the backend of all units; see :meth:`cqs.worker.Worker.choose_backend`.

        Raises:
            NotImplementedError: No backend, or not the named one, supports the tensors and options
                and has reproducible results.
            ValueError: Products of float32 may have less precision.
        """
        precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        if precision not in ("none", "ieee"):
            raise ValueError(
                f"reproducible calls require products of full precision, got {precision!r} in "
                "torch.backends.mkldnn.matmul.fp32_precision"
            )
        names = _BACKENDS[query.device.type]
        if self.backend is not None and self.backend not in names:
            raise NotImplementedError(
                f"backend {self.backend!r} has no reproducible results on this device: "
                f"backend=None chooses one of {', '.join(names)}"
            )
        tensors = query[:1, : query.shape[1] // key.shape[1]], key[:1, :1], value[:1, :1]
        name = names[0] if len(names) == 1 else self.backend
        return choose_backend(*tensors, name, self.dropout, self.pattern, self.terms, names)

    def run_steps(self, steps: Sequence[Step], *held: HeldTokens, **options: Any) -> list[Partial]:
        """Compute one partial output for each step; see :meth:`cqs.worker.Worker.run_steps`."""
        if not steps:
            return []
        worker = replace(self, chosen=self.chosen or self._choose_for(steps, held))
        if isinstance(worker.chosen, TaskBackend):
            return Worker.run_steps(worker, steps, *held, **options)

        def attend(unit: tuple[Step, Place]) -> Partial:
            step, place = unit
            own = _copy_tokens(place, held, ([step.queries], keys_of([step])))
            (part,) = Worker.run_steps(at_place(worker, place), [step], *own, **options)
            return part

        places = places_of(held[0].sample, held[1].sample)
        parts = run_in_threads(attend, product(steps, places))
        firsts = range(0, len(parts), len(places))
        return [Partial(*_join(parts[i : i + len(places)], places)) for i in firsts]

    def run_backward(
        self, steps: Sequence[Step], *held: HeldTokens, dtype: torch.dtype | None = None
    ) -> Gradients:
        """Compute the gradients of a task; see :meth:`cqs.worker.Worker.run_backward`.

        The tokens held must be those of the task alone.
        """
        worker = replace(self, chosen=self.chosen or self._choose_for(steps, held))
        ranges = held[0].ranges, held[1].ranges
        if isinstance(worker.chosen, TaskBackend):
            own = _copy_tokens(None, held, ranges)
            return Worker.run_backward(worker, steps, *own, dtype=dtype)

        def differentiate(place: Place) -> Gradients:
            own = _copy_tokens(place, held, ranges)
            return Worker.run_backward(at_place(worker, place), steps, *own, dtype=dtype)

        places = places_of(held[0].sample, held[1].sample)
        adds_sums = self.terms is not None and bool(self.terms.sums)
        parts = run_in_threads(differentiate, places, in_order=adds_sums)
        return Gradients(*_join(parts, places))


WORKERS = {False: Worker, True: UnitWorker}
"""Whether a problem is reproducible -> the class of its worker."""


def tokens_of_task(task: Task, held: Sequence[HeldTokens]) -> list[HeldTokens]:
    """Return the tokens that a task holds, as views.

    Args:
        task: The task.
        held: At least these tokens of query, key, value and other tensors of the queries.
    """
    taken = []
    for i, tokens in enumerate(held):
        ranges = task.held_keys if i in (1, 2) else task.held_queries
        taken.append(HeldTokens(None, ranges, [tokens.take([own]) for own in ranges]))
    return taken


def add_parts(
    totals: Sequence[Tensor], parts: Sequence[Tensor], held: Sequence[HeldTokens]
) -> None:
    """Add the gradients of a unit or task to those of the whole sequence.

    Args:
        totals: Sums for query, key and value, ``[batch, heads, seqlen, dim]``.
        parts: Gradients of the tokens held.
        held: Query, key and value, and others.
    """
    for total, part, tokens in zip(totals, parts, held, strict=False):
        lengths = list(map(len, tokens.ranges))
        for rows, values in zip(tokens.ranges, part.split(lengths, dim=2), strict=True):
            total[:, :, rows.start : rows.stop] += values.to(total.device)


def at_place(worker: AnyWorker, place: Place) -> AnyWorker:
    """Return the worker of tensors that have the batch element and heads of a place."""
    heads, terms = place.heads[0], worker.terms
    return replace(
        worker,
        dropout=worker.dropout and worker.dropout.moved(place.batch, heads.start),
        terms=terms and terms.part(place.row, heads),
    )


def run_in_threads(
    compute: Callable[[_Item], _Result], items: Iterable[_Item], *, in_order: bool = False
) -> list[_Result]:
    """Compute without gradients in as many threads as PyTorch uses, each with one of PyTorch.

    Args:
        compute: Called with each item.
        items: The items.
        in_order: Whether one thread computes all of them.
    """
    number, compute_one = torch.get_num_threads(), torch.no_grad()(compute)  # for each thread
    with one_thread():
        if number == 1 or in_order:
            return list(map(compute_one, items))
        with ThreadPoolExecutor(number, initializer=partial(torch.set_num_threads, 1)) as threads:
            return list(threads.map(compute_one, items))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread in the block."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def _copy_tokens(
    place: Place | None, held: Sequence[HeldTokens], ranges: Sequence[Sequence[range]]
) -> list[HeldTokens]:
    """Return contiguous copies of tokens of a place, in memory of the same alignment.

    Args:
        place: The batch element and heads; ``None`` means all.
        held: Query, key, value and other tensors of the queries.
        ranges: Queries and keys to copy.
    """
    copies = []
    for number, tokens in enumerate(held):
        has_keys = number in (1, 2)
        parts = tokens.split()
        if place is not None:
            parts = [part[place.row, place.heads[has_keys]] for part in parts]
        rows = HeldTokens(None, tokens.ranges, parts).take(ranges[has_keys])
        if len(ranges[has_keys]) == 1 or not rows.is_contiguous():  # not copied yet
            rows = rows.clone(memory_format=torch.contiguous_format)
        copies.append(HeldTokens(rows, tuple(ranges[has_keys])))
    return copies


def _join(parts: Sequence[Sequence[Tensor]], places: Sequence[Place]) -> list[Tensor]:
    """Return tensors of all batch elements and heads, given those of each place."""
    batch = places[-1].batch + 1
    joined = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    return [heads.view(batch, -1, *heads.shape[2:]) for heads in joined]
