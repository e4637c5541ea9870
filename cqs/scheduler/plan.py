"""Plans: the token groups and the W disjoint tasks of an attention problem."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from cqs.arguments import as_bool, as_integer
from cqs.scheduler.balancing import balance_work
from cqs.scheduler.cost import AttentionShape, TaskCost, predict_cost
from cqs.scheduler.interest_sets import (
    MAX_NUM_TASKS,
    check_interest_set,
    load_interest_set,
)
from cqs.scheduler.quorum import pair_offsets, quorum, shared_pair
from cqs.scheduler.strips import Count, Strip, join_strips
from cqs.scheduler.task import Step, Task, join_ranges
from cqs.scheduler.validate import validate_pattern_tasks, validate_tasks

_JSON_VERSION = 2
"""Version of the format of :meth:`Plan.to_json`; it changes with the names of the fields."""
_MAX_WITH_PATTERN = 1024
"""Largest number of tasks of a plan with a pattern: balancing examines all pairs of groups."""
MAX_LISTED = 4096
"""Largest number of tasks for which :attr:`Plan.tasks` lists all of them. This takes 20 s and 3 GB;
twice as many tasks take four times the time and memory."""


def make_plan(
    seqlen_q: int,
    seqlen_kv: int | None = None,
    *,
    num_tasks: int,
    is_causal: bool = False,
    interest_set: Iterable[int] | None = None,
    tile: int = 1,
    pattern: Any = None,
) -> "Plan":
    """Divide exact attention into ``num_tasks`` independent tasks of equal work.

    Planning uses integers only. A plan takes O(num_tasks), independent of the sequence length, and
    so does each task, which is made on first access. With a pattern, the first access to a task
    counts and balances the live pairs, in O(num_tasks^2) counts.

    Args:
        seqlen_q: Number of queries, at least 0.
        seqlen_kv: Number of keys and values, at least 0; ``None`` means ``seqlen_q``.
        num_tasks: Number of tasks and of token groups, from 1 to 262,144, or to 1,024 with a
            pattern. With 7, 13, 21, 31, 57, ... tasks, each task reads the fewest tokens for its
            number.
        is_causal: Whether query i sees only keys up to ``i + seqlen_kv - seqlen_q``: a causal mask
            aligned at the bottom right, as in FlashAttention.
        interest_set: A difference cover of the integers modulo ``num_tasks`` that contains 0;
            ``None`` means the best known one.
        tile: Number of tokens at whose multiples groups are cut, if they have at least as many.
            Kernels that compute tiles of this size then get whole tiles, and group sizes differ by
            up to one tile.
        pattern: A :class:`cqs.patterns.Pattern`, the same for all heads. Only pairs that it allows
            are computed; with ``is_causal``, only pairs that the causal mask allows too. No task
            exceeds the mean by more than 1 % or, if larger, one row or one tile of rows; tasks may
            have less than the mean.

    Returns:
        The plan. Repeated calls with the same arguments may return the same object.

    Raises:
        TypeError: A number is not an integer, ``is_causal`` is not a bool, or ``pattern`` is not a
            pattern.
        ValueError: A length is negative, ``tile`` is less than 1, ``num_tasks`` is out of range,
            ``interest_set`` is not a difference cover, or ``pattern`` does not fit the lengths or
            differs between heads.
        NotImplementedError: ``pattern & causal()`` has no exact representation.

    Example:
        >>> plan = make_plan(14, num_tasks=7)
        >>> plan.interest_set, plan.task(0).held_groups, plan.task(0).live_pairs
        ((0, 1, 3), (0, 1, 3), 28)
        >>> from cqs.patterns import sliding_window
        >>> plan = make_plan(7000, num_tasks=7, pattern=sliding_window(100))
        >>> plan.task(0).held_groups, plan.live_pairs, min(task.live_pairs for task in plan.tasks)
        ((0, 1), 701950, 95950)
    """
    seqlen_q = as_integer("seqlen_q", seqlen_q, 0)
    seqlen_kv = seqlen_q if seqlen_kv is None else as_integer("seqlen_kv", seqlen_kv, 0)
    most = MAX_NUM_TASKS if pattern is None else _MAX_WITH_PATTERN
    num_tasks = as_integer("num_tasks", num_tasks, 1, most)
    tile = as_integer("tile", tile, 1)
    is_causal = as_bool("is_causal", is_causal)
    if interest_set is None:
        chosen = load_interest_set(num_tasks)
    else:
        chosen = check_interest_set(interest_set, num_tasks)
    if pattern is not None:
        pattern = _check_pattern(pattern, is_causal)
        pattern.bind(seqlen_q, seqlen_kv)
        is_causal = False
    return _remembered_plan(seqlen_q, seqlen_kv, num_tasks, is_causal, chosen, tile, pattern)


@dataclass(frozen=True)
class Plan:
    """Assignment of all live pairs to tasks, made by :func:`make_plan`.

    The fields define the plan; groups and tasks are computed from them. Token groups are
    contiguous. Causal attention requires no zigzag order: of the group pairs (p, q) and (q, p)
    exactly one is live, and the same task owns both.

    With fewer queries than keys, causal queries are aligned with the last keys. The keys before
    them are visible to every query and are cut into W prefix groups, so that both parts are
    balanced. Plans with a pattern are cut in the same way.
    """

    seqlen_q: int
    seqlen_kv: int
    num_tasks: int
    is_causal: bool
    interest_set: tuple[int, ...]
    tile: int = 1
    pattern: Any = None
    """A :class:`cqs.patterns.Pattern` or ``None``. Only pairs that it allows are computed. It
    includes the causal mask, so ``is_causal`` is False."""

    @cached_property
    def token_groups(self) -> tuple[range, ...]:
        """The queries of each group: ``num_tasks`` ranges that tile ``range(seqlen_q)``.

        Sizes differ by at most one ``tile``. If ``seqlen_q > seqlen_kv``, the first causal queries
        see no key; they are added to group 0 and cause no work.
        """
        first, *rest = self._live_queries
        return range(0, first.stop), *rest

    @cached_property
    def key_groups(self) -> tuple[range, ...]:
        """Ranges that tile ``range(seqlen_kv)``; range i belongs to token group ``i % num_tasks``.

        There are ``num_tasks`` ranges, or ``2 * num_tasks`` for causal attention or a pattern with
        more keys than queries: the prefix groups, then the groups along the diagonal.
        """
        prefix = self._cut(0, self._num_prefix) if self._num_prefix else ()
        return *prefix, *self._cut(self._num_prefix, self.seqlen_kv)

    def task(self, index: int) -> Task:
        """Return one task. Takes O(num_tasks): 10 ms for 10,000 tasks, 0.5 s for 262,144.

        Args:
            index: Index of the task, in ``range(num_tasks)``.

        Raises:
            ValueError: ``index`` is out of range.
        """
        if not 0 <= index < self.num_tasks:
            raise ValueError(f"index must be in range({self.num_tasks}), got {index}")
        if self.pattern is not None:
            return self._levelled_task(index)
        partners = pair_offsets(self.interest_set, self.num_tasks).partners
        pair = shared_pair(index, self.interest_set, self.num_tasks)
        steps: list[Step] = []
        key_groups: set[int] = set()
        for query_group in quorum(index, self.interest_set, self.num_tasks):
            if not self._live_queries[query_group]:
                continue
            offset = (query_group - index) % self.num_tasks
            alone = [(b + index) % self.num_tasks for b in partners.get(offset, ())]
            if pair and not self.is_causal and query_group == pair[0]:
                alone.append(pair[1])
            seen = self._seen(query_group, alone)
            seen_by_half: tuple[list[int], list[int]] = ([], [])
            if pair and self.is_causal and query_group in pair:
                half = pair.index(query_group)
                # A group of one row has an empty first half.
                if len(self._live_queries[query_group]) >= 2 - half:
                    seen_by_half[half].extend(self._seen(query_group, [pair[1 - half]]))
            has_diagonal = self.is_causal and query_group == index
            new = self._make_steps(query_group, seen, seen_by_half, has_diagonal)
            if new:
                steps += new
                key_groups.update(seen, *seen_by_half)
                if has_diagonal:
                    key_groups.add(self._on_diagonal(query_group))
        return self._make_task(index, steps, key_groups)

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, ordered by index: O(num_tasks^2) integers, independent of sequence length.

        Raises:
            ValueError: ``num_tasks`` is more than 4,096. :meth:`task` returns single tasks.
        """
        if self.num_tasks > MAX_LISTED:
            raise ValueError(
                f"num_tasks must be at most {MAX_LISTED} where all tasks are listed, "
                f"got {self.num_tasks}: ask Plan.task for single tasks"
            )
        return tuple(self.task(index) for index in range(self.num_tasks))

    @cached_property
    def live_pairs(self) -> int:
        """Number of live (query, key) pairs of the whole problem."""
        if self.pattern is not None:
            return self._count(range(self.seqlen_q), range(self.seqlen_kv))
        if not self.is_causal:
            return self.seqlen_q * self.seqlen_kv
        diagonal = min(self.seqlen_q, self.seqlen_kv)
        return diagonal * self._num_prefix + diagonal * (diagonal + 1) // 2

    @cached_property
    def responsibility_ratio(self) -> float:
        """Live pairs of the whole problem divided by those of the busiest task.

        This is the ideal speedup: ``num_tasks`` up to the rounding of group sizes, or 1.0 if there
        are no live pairs.

        Raises:
            ValueError: ``num_tasks`` is more than 4,096, so :attr:`tasks` cannot be listed.
        """
        return self._ratio(task.live_pairs for task in self.tasks)

    def predict_cost(
        self, index: int, shape: AttentionShape, backend: str | None = None
    ) -> TaskCost:
        """Predict FLOPs, traffic and peak memory of one task's forward pass.

        With a pattern, the peak memory counts inputs and results, and no buffers of a backend.

        Args:
            index: Index of the task, in ``range(num_tasks)``.
            shape: Heads, head dimensions, batch and element size of the tensors.
            backend: Name of the backend, see ``cqs.scheduler.predict_cost``.

        Raises:
            ValueError: ``index`` is out of range.
        """
        pattern_bytes = None if self.pattern is None else 0
        return predict_cost(self.task(index), shape, backend, pattern_bytes=pattern_bytes)

    def validate(self) -> None:
        """Check that exactly one task computes each live pair, and that none computes masked pairs.

        The check uses :attr:`tasks` only, without an N x N array. It takes O(W^2 log W) time and
        memory: 2 s and 0.4 GB for 1,000 tasks. With a pattern, steps may cover masked pairs, but
        each of their key ranges must have a live pair.

        Raises:
            ValueError: A live pair is computed never or twice, or a masked pair is computed (the
                message gives the first rows); or ``num_tasks`` is more than 4,096.
        """
        if self.pattern is not None:
            validate_pattern_tasks(self.tasks, self.seqlen_q, self.seqlen_kv, self._count)
            return
        validate_tasks(self.tasks, self.seqlen_q, self.seqlen_kv, self.is_causal)

    def to_json(self, *, list_tasks: bool = False) -> str:
        """Return the plan as the text of a JSON object, which :meth:`from_json` reads.

        A pattern is written as its ``repr``, with a digest if the pattern is made from arrays.

        Args:
            list_tasks: Whether to include token groups, responsibility ratio and tasks, for readers
                without this package. These are O(W^2) integers.

        Raises:
            ValueError: ``list_tasks`` is set and ``num_tasks`` is more than 4,096.
        """
        written = self._numbers()
        if list_tasks:
            written |= {
                "token_groups": self._listed_groups(),
                "responsibility_ratio": self.responsibility_ratio,
                "tasks": list(map(_listed_task, self.tasks)),
            }
        return json.dumps(written)

    @classmethod
    def from_json(cls, text: str, pattern: Any = None) -> "Plan":
        """Read a plan from the text of :meth:`to_json`.

        The plan is made by :func:`make_plan`. Listed tasks are compared with the tasks of that plan
        one by one, up to the first difference.

        Args:
            text: A JSON object.
            pattern: The :attr:`pattern` of the plan that was written, or ``None`` if it had none.

        Raises:
            TypeError: ``pattern`` is not a pattern.
            ValueError: ``text`` is not a JSON object with each field of a plan once; it was written
                with another ``pattern``; or its groups and tasks contradict its numbers.
        """
        if pattern is not None:
            pattern = _check_pattern(pattern)
        try:
            written = json.loads(text, object_pairs_hook=_as_dict)
            if written["version"] != _JSON_VERSION:
                raise ValueError(
                    f"version must be {_JSON_VERSION}, got {written['version']!r}: plan again"
                )
            _compare_patterns(written["pattern"] if "pattern" in written else None, pattern)
            plan = make_plan(
                written["seqlen_q"],
                written["seqlen_kv"],
                num_tasks=written["num_tasks"],
                is_causal=written["is_causal"],
                interest_set=written["interest_set"],
                tile=written.get("tile", 1),
                pattern=pattern,
            )
            numbers = plan._numbers()
            listed = {name: written[name] for name in written if name not in numbers}
            is_plan = {name: written[name] for name in numbers} == numbers
            if not is_plan or (listed and not plan._implies(**listed)):
                raise ValueError("not a plan: its groups or tasks contradict its numbers")
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        return plan

    def __str__(self) -> str:
        """Describe the plan in one line."""
        kind = "causal" if self.is_causal else "full"
        if self.pattern is not None:
            kind = repr(self.pattern)
        return (
            f"{self.num_tasks} tasks over {self.seqlen_q} x {self.seqlen_kv} {kind} attention, "
            f"quorums of {len(self.interest_set)} groups (interest set {self.interest_set})"
        )

    def _numbers(self) -> dict[str, Any]:
        """Return the fields that define the plan, as JSON values."""
        return {
            "version": _JSON_VERSION,
            "num_tasks": self.num_tasks,
            "seqlen_q": self.seqlen_q,
            "seqlen_kv": self.seqlen_kv,
            "is_causal": self.is_causal,
            "interest_set": list(self.interest_set),
            **({"tile": self.tile} if self.tile != 1 else {}),
            **({"pattern": repr(self.pattern)} if self.pattern is not None else {}),
        }

    def _listed_groups(self) -> list[list[int]]:
        return [[group.start, group.stop] for group in self.token_groups]

    def _implies(
        self, *, token_groups: Any = None, responsibility_ratio: Any = None, tasks: Any = None
    ) -> bool:
        """Return whether listed groups, ratio and tasks (JSON values) are those of this plan."""
        return (
            isinstance(tasks, list)
            and len(tasks) == self.num_tasks
            and token_groups == self._listed_groups()
            and all(task == _listed_task(self.task(index)) for index, task in enumerate(tasks))
            and responsibility_ratio == self._ratio(task["live_pairs"] for task in tasks)
        )

    def _ratio(self, live_pairs: Iterable[int]) -> float:
        """Return the responsibility ratio of tasks with these numbers of live pairs."""
        return self.live_pairs / max(live_pairs) if self.live_pairs else 1.0

    @property
    def _num_prefix(self) -> int:
        """Number of keys before the first query's position, which every causal query sees."""
        has_diagonal = self.is_causal or self.pattern is not None
        return max(self.seqlen_kv - self.seqlen_q, 0) if has_diagonal else 0

    @property
    def _bound_pattern(self) -> Any:
        """The pattern at these lengths, a :class:`cqs.patterns.BoundPattern`, or None."""
        return None if self.pattern is None else self.pattern.bind(self.seqlen_q, self.seqlen_kv)

    @property
    def _count(self) -> Count:
        """The function that counts live pairs of the bound pattern."""
        count: Count = self._bound_pattern.count
        return count

    @cached_property
    def _shares(self) -> tuple[tuple[Strip, ...], ...]:
        """The strips of every task of a plan with a pattern."""
        groups = self._live_queries, self.key_groups
        return balance_work(*groups, self.interest_set, self.tile, self._count)

    def _levelled_task(self, index: int) -> Task:
        """Return a task of a plan with a pattern."""
        strips = list(join_strips(self._shares[index], self.key_groups, self._count))
        steps = [
            Step(group, queries, self._runs(list(keys)), None, live_pairs)
            for group, queries, keys, live_pairs in strips
        ]
        return self._make_task(index, steps, {i for strip in strips for i in strip.key_groups})

    def _make_task(self, index: int, steps: list[Step], key_groups: set[int]) -> Task:
        """Return the task with these steps; ``key_groups`` are indices of their key groups."""
        query_groups = sorted({step.query_group for step in steps})
        held_keys = [i for i in sorted(key_groups) if self.key_groups[i]]
        return Task(
            index=index,
            held_groups=tuple(sorted({*query_groups, *(i % self.num_tasks for i in held_keys)})),
            held_queries=tuple(self._live_queries[group] for group in query_groups),
            held_keys=tuple(self.key_groups[i] for i in held_keys),
            steps=tuple(steps),
        )

    @cached_property
    def _live_queries(self) -> tuple[range, ...]:
        first = max(self.seqlen_q - self.seqlen_kv, 0) if self.is_causal else 0
        return self._cut(first, self.seqlen_q)

    def _on_diagonal(self, group: int) -> int:
        """Return the index among ``key_groups`` of the keys aligned with the queries of a group."""
        return len(self.key_groups) - self.num_tasks + group

    def _cut(self, start: int, stop: int) -> tuple[range, ...]:
        """Cut ``range(start, stop)`` into one range per group; sizes differ by at most a tile."""
        length, parts = stop - start, self.num_tasks
        tile = self.tile if length >= parts * self.tile else 1
        num_tiles = -(-length // tile)
        marks = [start + min(g * num_tiles // parts * tile, length) for g in range(parts + 1)]
        return tuple(map(range, marks[:-1], marks[1:]))

    def _seen(self, query_group: int, groups: list[int]) -> list[int]:
        """Return the key groups of some token groups that every query of a token group sees.

        Args:
            query_group: Index of the token group of the queries.
            groups: Indices of token groups.

        Returns:
            Indices into :attr:`key_groups`: all of ``groups`` if attention is non-causal, otherwise
            their prefix groups, and their diagonal groups before that of ``query_group``.
        """
        if not self.is_causal:
            return groups
        prefix = groups if self._num_prefix else []
        return prefix + [self._on_diagonal(group) for group in groups if group < query_group]

    def _make_steps(
        self,
        query_group: int,
        seen: list[int],
        seen_by_half: tuple[list[int], list[int]],
        has_diagonal: bool,
    ) -> list[Step]:
        """Return the steps of a query group: one, or one per half of its rows if these differ."""
        queries = self._live_queries[query_group]
        causal_keys = self.key_groups[self._on_diagonal(query_group)] if has_diagonal else range(0)
        if any(seen_by_half):
            tile = self.tile if len(queries) >= 2 * self.tile else 1
            half = len(queries) // 2 // tile * tile
            first, second = (self._runs(seen + extra) for extra in seen_by_half)
            cuts = [
                (queries[:half], first, causal_keys[:half]),
                (queries[half:], join_ranges([*second, causal_keys[:half]]), causal_keys[half:]),
            ]
        else:
            cuts = [(queries, self._runs(seen), causal_keys)]
        return [
            Step.of(query_group, rows, runs, causal or None)
            for rows, runs, causal in cuts
            if rows and (runs or causal)
        ]

    def _runs(self, indices: list[int]) -> tuple[range, ...]:
        """Return the key groups with these indices, joined into as few ranges as possible."""
        runs: list[range] = []
        indices = sorted(indices)
        first = 0
        for last, index in enumerate(indices):
            if last + 1 == len(indices) or indices[last + 1] != index + 1:
                start = self.key_groups[indices[first]].start
                runs.append(range(start, self.key_groups[index].stop))
                first = last + 1
        return join_ranges(runs)


def _check_pattern(pattern: Any, is_causal: bool = False) -> Any:
    """Return ``pattern``, intersected with the causal mask if ``is_causal``."""
    from cqs.patterns import Pattern, causal

    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a cqs.patterns.Pattern or None, got {pattern!r}")
    return pattern & causal() if is_causal else pattern


def _listed_task(task: Task) -> dict[str, Any]:
    """Return a task as JSON values."""
    return {
        "index": task.index,
        "held_groups": list(task.held_groups),
        "blocks": [
            [queries.start, queries.stop, keys.start, keys.stop] for queries, keys, _ in task.blocks
        ],
        "live_pairs": task.live_pairs,
    }


def _as_dict(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object, or raise ValueError if one is repeated."""
    found = dict(fields)
    if len(found) != len(fields):
        raise ValueError(f"not a plan: a field is there twice: {[name for name, _ in fields]}")
    return found


def _compare_patterns(written: str | None, pattern: Any) -> None:
    """Raise ValueError unless ``written`` is the ``repr`` of ``pattern``."""
    given = None if pattern is None else repr(pattern)
    if written != given:
        raise ValueError(f"the pattern of the plan is {written}, got {given}: pass the same")


_remembered_plan = lru_cache(maxsize=8)(Plan)
"""Cache of plans: the layers of a model request the same plan repeatedly."""
