"""Tasks cut into batches and parts, so that a rank holds few of its tokens at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple

from cqs.executors.distributed.layout import Layout
from cqs.executors.distributed.route import Route
from cqs.executors.distributed.token_order import make_rounds
from cqs.patterns import BoundPattern
from cqs.ranges import overlap
from cqs.scheduler import Step
from cqs.scheduler.rounds import KEYS, QUERIES
from cqs.scheduler.task import join_ranges


class Cell(NamedTuple):
    """The pairs that a task computes of one query group and one range of key groups."""

    units: tuple[int, int]
    """Index of the query group, and of the range among those of the plan."""
    step: Step
    """Queries and keys."""


Cells = Sequence[Sequence[Cell]]
"""For every rank, cells of its task."""


def cut_tasks(layout: Layout) -> Cells:
    """Cut the tasks of all ranks by token groups on both sides, given the layout of one rank."""
    plan = layout.plan
    bound = None if plan.pattern is None else plan.pattern.bind(plan.seqlen_q, plan.seqlen_kv)
    tasks = [
        [cell for step in task.steps for cell in _cut_step(step, plan.key_groups, bound)]
        for task in map(plan.task, range(plan.num_tasks))
    ]
    num_ranks = len(layout.query_route.shards)
    return [tasks[rank * plan.num_tasks // num_ranks] for rank in range(num_ranks)]


def count_units(cells: Cells) -> tuple[int, int]:
    """Return the largest number of groups of queries, and of ranges of keys, of a task."""
    queries, keys = (
        max(len({cell.units[side] for cell in task}) for task in cells) for side in (QUERIES, KEYS)
    )
    return queries, keys


def order_tokens(
    layout: Layout, cells: Cells, resident: int, num_batches: int, is_streamed: bool
) -> Layout:
    """Return the layout of a rank that receives tokens in an order.

    Args:
        layout: The layout of the rank, with gradients.
        cells: The cells of all ranks.
        resident: See :class:`TokenOrder`.
        num_batches: See :class:`TokenOrder`.
        is_streamed: See :class:`TokenOrder`.
    """
    plan, streamed, steps = layout.plan, 1 - resident, layout.steps
    number = len(plan.key_groups) if is_streamed else 1

    def route(side: int, part: Cells) -> Route:
        shards = (layout.query_route, layout.key_route)[side].shards
        return Route(shards, [_tokens(task, side) for task in part], layout.rank)

    def divide(side: int, whole: Cells, number: int) -> Iterator[Cells]:
        """Yield the first cells of every rank, the second, and so on; some ranks have fewer.

        A task begins with the groups of its own index on both sides, so that at any time the tasks
        receive tokens of different ranks.
        """
        tasks = list[list[list[Cell]]]()
        for rank, cells in enumerate(whole):
            units = dict[tuple[int, int], list[Cell]]()
            for cell in cells:
                unit, own = cell.units[side], rank * plan.num_tasks // len(whole)
                units.setdefault(((unit - own) % plan.num_tasks, unit), []).append(cell)
            tasks.append(_divide([units[place] for place in sorted(units)], number))
        return zip_longest(*tasks, fillvalue=())

    batches = (
        (
            route(resident, batch),
            [
                (route(streamed, part), _to_steps(part[layout.rank]))
                for part in divide(streamed, batch, number)
            ],
        )
        for batch in divide(resident, cells, num_batches)
    )
    rounds = tuple(make_rounds(resident, batches))
    separate: dict[str, Any] = {"own_steps": (), "home_steps": (), "away_steps": steps}
    return replace(layout, rounds=rounds, is_bounded=True, **separate)


def _cut_step(step: Step, units: Sequence[range], bound: BoundPattern | None) -> Iterator[Cell]:
    """Cut the keys of a step at the ends of ``units``; parts without a live pair are dropped."""
    group, queries, square = step.query_group, step.queries, step.causal_keys
    for i, unit in enumerate(units):
        parts = (overlap(keys, unit) for keys in step.keys)
        live = [part for part in parts if part and (bound is None or bound.count(queries, part))]
        diagonal = square if square is not None and square.start in unit else None
        if live or diagonal is not None:
            yield Cell((group, i), Step.of(group, queries, live, diagonal))


def _divide(units: Sequence[Iterable[Cell]], number: int) -> list[list[Cell]]:
    """Divide units into at most ``number`` lists of their cells."""
    number = min(number, len(units))
    marks = [i * len(units) // number for i in range(number + 1)] if number else [0]
    return [[*chain(*units[a:b])] for a, b in pairwise(marks)]


def _to_steps(cells: Iterable[Cell]) -> tuple[Step, ...]:
    """Join the cells of the same rows into one step each."""
    rows: dict[tuple[int, range], list[Step]] = {}
    for _, step in sorted(cells, key=lambda cell: cell.step.queries.start):
        rows.setdefault((step.query_group, step.queries), []).append(step)
    return tuple(
        Step.of(
            *queries,
            chain(*(step.keys for step in steps)),
            next(filter(None, (step.causal_keys for step in steps)), None),
        )
        for queries, steps in rows.items()
    )


def _tokens(cells: Iterable[Cell], side: int) -> tuple[range, ...]:
    """Return the queries, or the keys, of cells in ascending ranges."""
    blocks = (block for cell in cells for block in cell.step.blocks())
    return join_ranges(block.queries if side == QUERIES else block.keys for block in blocks)
