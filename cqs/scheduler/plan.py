"""Plans: the token groups and the W disjoint tasks of an attention problem."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from cqs.arguments import as_bool, as_integer
from cqs.scheduler.cost import AttentionShape, TaskCost, predict_cost
from cqs.scheduler.interest_sets import MAX_NUM_TASKS
from cqs.scheduler.kinds import Documents, Kind, Quorums, fit_kind, is_final, read_kind
from cqs.scheduler.task import Step, Task
from cqs.scheduler.token_groups import TokenGroups
from cqs.scheduler.validate import validate_single_tasks, validate_tasks

if TYPE_CHECKING:  # other plans are made without NumPy
    from cqs.scheduler.placement import Placement

_JSON_VERSIONS = (2, 3)
"""Versions of the format of :meth:`Plan.to_json`: of quorum plans, and of plans of other kinds."""
_JSON_NUMBERS = ("num_tasks", "seqlen_q", "seqlen_kv", "is_causal")
"""Fields of a plan that its JSON object has under the same name."""
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
    kind: Kind | str = "quorums",
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
            pattern.
        is_causal: Whether query i sees only keys up to ``i + seqlen_kv - seqlen_q``: a causal mask
            aligned at the bottom right, as in FlashAttention.
        kind: Pairs of groups that a task computes: ``"quorums"``, ``"rows"``, ``"grid"``,
            ``"documents"``, or one of :class:`Quorums`, :class:`Grid2D`, :class:`Hosts` and
            :class:`Documents`.
        tile: Number of tokens at whose multiples groups are cut, if they have at least as many.
            Kernels that compute tiles of this size then get whole tiles, and group sizes differ by
            up to one tile.
        pattern: A :class:`cqs.patterns.Pattern`, the same for all heads. Only pairs that it allows
            are computed; with ``is_causal``, only pairs that the causal mask allows too. No task
            of a quorum or row plan exceeds the mean by more than 1 %, or 2.5 % for documents or, if
            larger, one row or one tile of rows. Tasks may have less than the mean.

    Returns:
        The plan. Repeated calls with the same arguments may return the same object.

    Raises:
        TypeError: A number is not an integer, ``is_causal`` is not a bool, ``kind`` is not a kind,
            or ``pattern`` is not a pattern.
        ValueError: A length is negative, ``tile`` is less than 1, ``num_tasks`` is out of range,
            ``kind`` does not fit it, or ``pattern`` does not fit the lengths or differs between
            heads.
        NotImplementedError: ``pattern & causal()`` has no exact representation.

    Example:
        >>> plan = make_plan(14, num_tasks=7)
        >>> plan.kind, plan.task(0).held_groups, plan.task(0).live_pairs
        (Quorums(interest_set=(0, 1, 3)), (0, 1, 3), 28)
        >>> plan = make_plan(8, num_tasks=2, is_causal=True, kind="rows")
        >>> [task.live_pairs for task in plan.tasks]
        [15, 21]
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
    kind = fit_kind(kind, num_tasks)
    if pattern is not None:
        pattern = _check_pattern(pattern, is_causal)
        pattern.bind(seqlen_q, seqlen_kv)
        is_causal = False
    plan = _remembered_plan(seqlen_q, seqlen_kv, num_tasks, is_causal, kind, tile, pattern)
    if isinstance(kind, Documents):
        kind.place(plan._groups)  # raises an error unless the kind fits the pattern
    return plan


@dataclass(frozen=True)
class Plan:
    """Assignment of all live pairs to tasks, made by :func:`make_plan`.

    The fields define the plan; groups and tasks are computed from them. Token groups are
    contiguous; causal attention needs no zig-zag order.

    With fewer queries than keys, causal queries are aligned with the last keys. The keys before
    them are visible to every query and are cut into W prefix groups, so that both parts are
    balanced. Plans with a pattern are cut in the same way.
    """

    seqlen_q: int
    seqlen_kv: int
    num_tasks: int
    is_causal: bool
    kind: Kind
    tile: int = 1
    pattern: Any = None
    """A :class:`cqs.patterns.Pattern` or ``None``. Only pairs that it allows are computed. It
    includes the causal mask, so ``is_causal`` is False."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone; groups and tasks are computed again."""
        return Plan, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def interest_set(self) -> tuple[int, ...]:
        """The interest set of a quorum plan.

        Raises:
            ValueError: The plan is of another kind.
        """
        if not isinstance(self.kind, Quorums):
            raise ValueError(f"kind must be Quorums for an interest set, got {self.kind}")
        return self.kind.interest_set

    @cached_property
    def token_groups(self) -> tuple[range, ...]:
        """The queries of each group: ``num_tasks`` ranges that tile ``range(seqlen_q)``.

        Sizes differ by at most one ``tile``. If ``seqlen_q > seqlen_kv``, the first causal queries
        see no key; they are added to group 0 and cause no work.
        """
        first, *rest = self._groups.queries
        return range(0, first.stop), *rest

    @cached_property
    def key_groups(self) -> tuple[range, ...]:
        """Ranges that tile ``range(seqlen_kv)``; range i belongs to token group ``i % num_tasks``.

        There are ``num_tasks`` ranges, or ``2 * num_tasks`` for causal attention or a pattern with
        more keys than queries: the prefix groups, then the groups along the diagonal.
        """
        return self._groups.keys

    def task(self, index: int) -> Task:
        """Return one task. Takes O(num_tasks): 10 ms for 10,000 tasks, 0.5 s for 262,144.

        Args:
            index: Index of the task, in ``range(num_tasks)``.

        Raises:
            ValueError: ``index`` is out of range.
        """
        if not 0 <= index < self.num_tasks:
            raise ValueError(f"index must be in range({self.num_tasks}), got {index}")
        steps, groups = self._steps_of_task(index), self._groups
        query_groups = sorted({step.query_group for step in steps})
        held_keys = groups.held_keys(steps)
        return Task(
            index=index,
            held_groups=tuple(sorted({*query_groups, *(i % self.num_tasks for i in held_keys)})),
            held_queries=tuple(groups.queries[group] for group in query_groups),
            held_keys=tuple(groups.keys[i] for i in held_keys),
            steps=tuple(steps),
        )

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
        return self._groups.count(range(self.seqlen_q), range(self.seqlen_kv))

    @cached_property
    def responsibility_ratio(self) -> float:
        """Live pairs of the whole problem divided by those of the busiest task.

        This is the ideal speedup: ``num_tasks`` up to the rounding of group sizes, or 1.0 if there
        are no live pairs.

        Raises:
            ValueError: ``num_tasks`` is more than 4,096, so :attr:`tasks` cannot be listed.
        """
        busiest = max(task.live_pairs for task in self.tasks)
        return self.live_pairs / busiest if busiest else 1.0

    @cached_property
    def placement(self) -> "Placement":
        """The tasks of packed documents as arrays, with their balance and the bytes moved.

        Raises:
            ValueError: The plan is not one of documents.
        """
        if not isinstance(self.kind, Documents):
            raise ValueError(f"kind must be Documents for a placement, got {self.kind}")
        return self.kind.place(self._groups)

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
                message gives the first rows); a row of a plan without merges has two tasks; or
                ``num_tasks`` is more than 4,096.
        """
        validate_tasks(self.tasks, self._groups)
        if is_final(self.kind):
            validate_single_tasks(self.tasks)

    def to_json(self, *, list_tasks: bool = False) -> str:
        """Return the plan as the text of a JSON object, which :meth:`from_json` reads.

        A pattern is written as its ``repr``, with a digest if the pattern is made from arrays.

        Args:
            list_tasks: Whether to include token groups, responsibility ratio and tasks, for readers
                without this package. These are O(W^2) integers.

        Raises:
            ValueError: ``list_tasks`` is set and ``num_tasks`` is more than 4,096.
        """
        written: dict[str, Any] = {
            "version": _JSON_VERSIONS[not isinstance(self.kind, Quorums)],
            **{name: getattr(self, name) for name in _JSON_NUMBERS},
            **self.kind.to_json(),
        }
        if self.tile != 1:
            written["tile"] = self.tile
        if self.pattern is not None:
            written["pattern"] = repr(self.pattern)
        if list_tasks:
            written["token_groups"] = [[group.start, group.stop] for group in self.token_groups]
            written["responsibility_ratio"] = self.responsibility_ratio
            written["tasks"] = list(map(_describe, self.tasks))
        return json.dumps(written)

    @classmethod
    def from_json(cls, text: str, pattern: Any = None) -> "Plan":
        """Read a plan from the text of :meth:`to_json`.

        The plan is made by :func:`make_plan`, and the text must be the one that it would write.

        Args:
            text: A JSON object.
            pattern: The :attr:`pattern` of the plan that was written, or ``None`` if it had none.

        Raises:
            TypeError: ``pattern`` is not a pattern.
            ValueError: ``text`` is not a JSON object with the fields of a plan; it was written with
                another ``pattern``; its groups and tasks contradict its numbers; or tasks are
                listed and ``num_tasks`` is more than 4,096.
        """
        if pattern is not None:
            pattern = _check_pattern(pattern)
        try:
            written = json.loads(text)
            if written["version"] not in _JSON_VERSIONS:
                raise ValueError(f"version must be 2 or 3, got {written['version']!r}: plan again")
            recorded, given = written.get("pattern"), None if pattern is None else repr(pattern)
            if recorded != given:
                raise ValueError(
                    f"the pattern of the plan is {recorded}, got {given}: pass the same"
                )
            plan = make_plan(
                **{name: written[name] for name in _JSON_NUMBERS},
                kind=read_kind(written),
                tile=written.get("tile", 1),
                pattern=pattern,
            )
            is_listed = "tasks" in written
            # A short text that claims many tasks is rejected before these are listed.
            is_short = is_listed and len(written["tasks"]) != plan.num_tasks <= MAX_LISTED
            if is_short or json.loads(plan.to_json(list_tasks=is_listed)) != written:
                raise ValueError("not a plan: its groups or tasks contradict its numbers")
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a plan: {error!r}") from error
        return plan

    def __str__(self) -> str:
        """Describe the plan in one line."""
        dense = "causal" if self.is_causal else "non-causal"
        mask = dense if self.pattern is None else repr(self.pattern)
        return (
            f"{self.num_tasks} tasks over {self.seqlen_q} x {self.seqlen_kv} {mask} attention, "
            f"{self.kind}"
        )

    @cached_property
    def _groups(self) -> TokenGroups:
        bound = None if self.pattern is None else self.pattern.bind(self.seqlen_q, self.seqlen_kv)
        return TokenGroups(
            self.seqlen_q, self.seqlen_kv, self.num_tasks, self.is_causal, self.tile, bound
        )

    @cached_property
    def _steps_of_task(self) -> Callable[[int], list[Step]]:
        """The function that lists the steps of a task, given its index."""
        return self.kind.divide(self._groups)


def _describe(task: Task) -> dict[str, Any]:
    """Return a task as JSON types."""
    return {
        "index": task.index,
        "held_groups": task.held_groups,
        "blocks": [(q.start, q.stop, k.start, k.stop) for q, k, _ in task.blocks],
        "live_pairs": task.live_pairs,
    }


def _check_pattern(pattern: Any, is_causal: bool = False) -> Any:
    """Return ``pattern``, intersected with the causal mask if ``is_causal``."""
    from cqs.patterns import Pattern, causal

    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a cqs.patterns.Pattern or None, got {pattern!r}")
    return pattern & causal() if is_causal else pattern


_remembered_plan = lru_cache(maxsize=8)(Plan)
"""Cache of plans: the layers of a model request the same plan repeatedly."""
