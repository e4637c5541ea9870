"""Tasks cut into batches and parts, so that a rank holds few of its tokens at a time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from cqs.executors.distributed.route import Route
from cqs.executors.distributed.token_order import TokenOrder, make_rounds
from cqs.patterns import BoundPattern
from cqs.ranges import overlap
from cqs.scheduler import Plan, Step
from cqs.scheduler.rounds import KEYS, QUERIES, Round
from cqs.scheduler.task import join_ranges


class Cell(NamedTuple):
    """The pairs that a task computes of one query group and one range of key groups."""

    units: tuple[int, int]
    """Index of the query group, and of the range among those of the plan."""
    step: Step
    """Queries and keys."""


@dataclass(frozen=True)
class CutPlan:
    """The tasks of all ranks, cut by token groups on both sides."""

    plan: Plan
    shards: tuple[Sequence[range], Sequence[range]]
    """For every rank, the positions of its queries, and of its keys."""
    head_parallel: int

    @cached_property
    def _rounds(self) -> dict[Any, tuple[Round[Route], ...]]:
        """Rounds by rank and by order without head chunks, which are alike."""
        return {}

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """The cells of every rank's task."""
        plan, number = self.plan, self.plan.num_tasks
        pattern = plan.pattern
        bound = None if pattern is None else pattern.bind(plan.seqlen_q, plan.seqlen_kv)
        units = plan.key_groups
        task_cells = [
            [cell for step in plan.task(index).steps for cell in _cut_step(step, units, bound)]
            for index in range(number)
        ]
        return [task_cells[rank // self.head_parallel] for rank in range(len(self.shards[0]))]

    @property
    def num_units(self) -> tuple[int, int]:
        """Largest number of groups of queries, and of ranges of keys, of a task."""
        queries, keys = (
            max(len({cell.units[side] for cell in cells}) for cells in self.cells)
            for side in (QUERIES, KEYS)
        )
        return queries, keys

    def _wanted(self, order: TokenOrder) -> list[tuple[list[list[Cell]], list[list[list[Cell]]]]]:
        """Return the cells of every rank in each batch, and in each of its parts.

        A task begins with the groups of its own index on both sides, so that at any time the tasks
        receive tokens of different ranks.
        """
        resident, streamed = order.resident, 1 - order.resident
        batches = [
            _divide_units(self._ordered(rank, resident, cells), resident, order.num_batches)
            for rank, cells in enumerate(self.cells)
        ]
        wanted = []
        for batch in _by_index(batches):
            parts = [
                _divide_units(
                    self._ordered(rank, streamed, cells),
                    streamed,
                    len(cells) if order.is_streamed else 1,
                )
                for rank, cells in enumerate(batch)
            ]
            wanted.append((batch, _by_index(parts)))
        return wanted

    def rounds(self, order: TokenOrder, rank: int) -> tuple[Round[Route], ...]:
        """Return the rounds of a rank."""
        key = rank, *order[1:]
        if key not in self._rounds:
            resident, streamed = order.resident, 1 - order.resident
            batches = [
                (
                    self._route(cells, resident, rank),
                    [(self._route(part, streamed, rank), _to_steps(part[rank])) for part in parts],
                )
                for cells, parts in self._wanted(order)
            ]
            self._rounds[key] = tuple(make_rounds(resident, batches))
        return self._rounds[key]

    def _ordered(self, rank: int, side: int, cells: list[Cell]) -> list[Cell]:
        own, number = rank // self.head_parallel, self.plan.num_tasks
        return sorted(cells, key=lambda cell: ((cell.units[side] - own) % number, cell.units[side]))

    def _route(self, rank_cells: Sequence[list[Cell]], side: int, rank: int) -> Route:
        return Route(self.shards[side], [_tokens(cells, side) for cells in rank_cells], rank)


def _cut_step(step: Step, units: Sequence[range], bound: BoundPattern | None) -> Iterable[Cell]:
    """Cut the keys of a step at the ends of ``units``; parts without a live pair are dropped."""
    keys: dict[int, list[range]] = {}
    for key_range in step.keys:
        for i, unit in enumerate(units):
            common = overlap(key_range, unit)
            if common and (bound is None or bound.count(step.queries, common)):
                keys.setdefault(i, []).append(common)
    square = step.causal_keys
    if square is not None:
        first = next(i for i, unit in enumerate(units) if square.start in unit)
        keys.setdefault(first, [])
    for i, ranges in keys.items():
        diagonal = square if square is not None and i == first else None
        yield Cell((step.query_group, i), Step.of(step.query_group, step.queries, ranges, diagonal))


def _divide_units(cells: list[Cell], side: int, number: int) -> list[list[Cell]]:
    """Divide ordered cells into at most ``number`` lists of whole units of a side."""
    units = [list(unit) for _, unit in groupby(cells, key=lambda cell: cell.units[side])]
    number = min(number, len(units))
    marks = [i * len(units) // number for i in range(number + 1)] if number else [0]
    return [
        [cell for unit in units[a:b] for cell in unit]
        for a, b in zip(marks, marks[1:], strict=False)
    ]


def _by_index(rank_lists: Sequence[Sequence[list[Cell]]]) -> list[list[list[Cell]]]:
    """Return the first list of every rank, the second, and so on; some ranks have fewer."""
    most = max(map(len, rank_lists))
    return [[lists[i] if i < len(lists) else [] for lists in rank_lists] for i in range(most)]


def _to_steps(cells: Iterable[Cell]) -> tuple[Step, ...]:
    """Join the cells of the same rows into one step each."""
    rows: dict[tuple[int, range], list[Step]] = {}
    for cell in cells:
        rows.setdefault((cell.step.query_group, cell.step.queries), []).append(cell.step)
    return tuple(
        Step.of(
            group,
            queries,
            [keys for step in steps for keys in step.keys],
            next((step.causal_keys for step in steps if step.causal_keys is not None), None),
        )
        for (group, queries), steps in sorted(rows.items(), key=lambda item: item[0][1].start)
    )


def _tokens(cells: Iterable[Cell], side: int) -> tuple[range, ...]:
    """Return the queries, or the keys, of cells in ascending ranges."""
    if side == QUERIES:
        return join_ranges(cell.step.queries for cell in cells)
    return join_ranges(block.keys for cell in cells for block in cell.step.blocks())
