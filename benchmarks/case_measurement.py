"""The published case study: memory and time of the worker with the longest subsequence.

Bian and Somani (IEEE Access 2025) compare, for sequences of 10,000 to 49,000 tokens, the longest
subsequence that one of 4, 7, 8 and 31 workers receives, the time that it takes, and its memory.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, gcd
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.memory_samples import STATM, record_memory, record_resident
from cqs.report.measurement import Measurement, installed_versions, summarize
from cqs.report.passes import MeasuredPass
from cqs.report.rows import fields_of
from cqs.report.settings import Settings
from cqs.report.timing import Timer, make_timer, run_in_turn
from cqs.scheduler import Plan, Quorums, Task, make_plan, quorum

NUM_TASKS = (1, 4, 7, 8, 31)
TOKENS = (10_000, 20_000, 30_000, 40_000, 45_000, 46_000, 47_000, 48_000, 49_000)
"""Sequence lengths of the published study."""
TENSORS, RESIDENT = "tensors", "resident set"
"""Kinds of measured memory."""
_MOST_SAMPLES = 128


@dataclass(frozen=True, kw_only=True)
class CaseRow(Measurement, Settings):
    """A row for the task with the longest subsequence; the ratio refers to the whole problem."""

    tile: int
    """Number of tokens at whose multiples the plan's groups end."""
    held_tokens: int
    """Longest subsequence: tokens that the task reads."""
    versions: dict[str, str] = field(default_factory=installed_versions)
    interest_set: list[int]
    """Interest set of the plan."""
    whole_ms: float
    """Time of the whole problem on one worker, in milliseconds."""
    predicted_bytes: int
    """Predicted peak memory in bytes, including the inputs of the task."""
    peak_bytes: int
    """Measured peak memory in bytes."""
    memory: str
    """Kind of memory: :data:`TENSORS` of PyTorch, or :data:`RESIDENT` of the process."""
    sample_seconds: list[float]
    """Times of the samples in seconds, from before the task received its inputs."""
    sample_bytes: list[int]
    """Memory from each sample on, in bytes; of many adjacent samples the largest is kept."""

    @property
    def samples(self) -> list[tuple[float, int]]:
        """Samples as (seconds, bytes), for :func:`benchmarks.plots.memory.plot_memory`."""
        return list(zip(self.sample_seconds, self.sample_bytes, strict=True))


def plan_case(settings: Settings, num_tasks: int) -> Plan:
    """Plan as published, except for the choice of the interest set.

    Groups end at any token. The multiples of an interest set by units modulo W are equivalent
    except for the sizes of their groups, which differ by one token. The published scheduler takes
    an arbitrary multiple, this function one with the shortest longest subsequence.
    """
    make = partial(
        make_plan,
        settings.tokens,
        num_tasks=num_tasks,
        is_causal=settings.is_causal,
        pattern=settings.make_pattern(),
    )
    plan = make()
    sizes = list(map(len, plan.token_groups))

    def longest(interest_set: tuple[int, ...]) -> int:
        quorums = (quorum(worker, interest_set, num_tasks) for worker in range(num_tasks))
        return max(sum(sizes[group] for group in groups) for groups in quorums)

    units = [unit for unit in range(1, num_tasks + 1) if gcd(unit, num_tasks) == 1]
    multiples = [
        tuple(sorted(unit * offset % num_tasks for offset in plan.interest_set)) for unit in units
    ]
    return make(kind=Quorums(min(multiples, key=longest)))


def longest_task(plan: Plan) -> Task:
    """Return the task that reads the most tokens; of several, the one with the most live pairs."""
    return max(plan.tasks, key=lambda task: (task.held_tokens, task.live_pairs))


def measure(
    settings: Settings,
    workers: Sequence[int],
    tick: Callable[[], object] = lambda: None,
    snapshots: Path | None = None,
) -> list[CaseRow]:
    """Measure the longest task for each number of workers, and the whole problem, in turn.

    Args:
        settings: Settings with executor ``"local"``.
        workers: Their numbers.
        tick: Called once for each of them, checked and recorded, and after every repeat.
        snapshots: Folder for files ``memory-N-wW.pickle`` of the allocator's history on a GPU.

    Raises:
        VerificationError: The merged result of all tasks is wrong.
    """
    work, timer = MeasuredPass(settings, "forward"), make_timer()
    plans = {number: plan_case(settings, number) for number in sorted({1, *workers})}
    tasks = {number: longest_task(plan) for number, plan in plans.items()}
    recordings = {}
    for number in workers:
        _check(work, plans[number])
        name = f"memory-{settings.tokens}-w{number}.pickle"
        path = None if snapshots is None else snapshots / name
        recordings[number] = _record(work, tasks[number], settings.repeats, path)
        tick()
    contenders = {str(number): partial(_time, work, task, timer) for number, task in tasks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for found in run_in_turn(contenders, settings.repeats):
        for name, each in found.items():
            seconds[name].append(each)
        tick()
    return [
        _make_row(
            settings,
            plans[number],
            tasks[number],
            recordings[number],
            seconds=seconds[str(number)],
            whole=seconds["1"],
            predicted_bytes=work.predict_bytes(tasks[number], work.backend),
        )
        for number in workers
    ]


class _Recording(NamedTuple):
    memory: str
    samples: list[tuple[float, int]]


def _check(work: MeasuredPass, plan: Plan) -> None:
    results = [work.compute(task, work.hold(task)) for task in plan.tasks]
    work.verify(work.merge(results))


def _record(work: MeasuredPass, task: Task, repeats: int, snapshot_path: Path | None) -> _Recording:
    """Record the memory of a task from before it receives its inputs until all is freed.

    The fastest repeat is kept, because other programs may have run during the others.
    """
    device = work.problem.query.device

    def compute() -> None:
        held = work.hold(task)
        results = work.compute(task, held)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del held, results

    memory, record = TENSORS, partial(record_memory, compute, device, snapshot_path)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks may be 1 MB larger than requested
        compute()  # allocate the blocks before the recording
    elif STATM.exists():
        memory, record = RESIDENT, partial(record_resident, compute)
    gc.collect()  # no other object may be freed during the recording
    recorded = [record()[1] for _ in range(repeats)]
    return _Recording(memory, min(recorded, key=lambda samples: samples[-1][0]))


def _time(work: MeasuredPass, task: Task, timer: Timer) -> float:
    return timer.time(partial(work.compute, task, work.hold(task)))[0]


def _make_row(
    settings: Settings,
    plan: Plan,
    task: Task,
    recording: _Recording,
    *,
    seconds: list[float],
    whole: list[float],
    predicted_bytes: int | None,
) -> CaseRow:
    assert predicted_bytes is not None
    samples = _thin(recording.samples)
    return CaseRow(
        benchmark="memory",
        baseline="one worker",
        ratio=statistics.median(one / all_ for one, all_ in zip(seconds, whole, strict=True)),
        interest_set=list(plan.interest_set),
        held_tokens=task.held_tokens,
        whole_ms=1e3 * statistics.median(whole),
        predicted_bytes=predicted_bytes,
        peak_bytes=max(held for _, held in samples),
        memory=recording.memory,
        sample_seconds=[round(at, 7) for at, _ in samples],
        sample_bytes=[held for _, held in samples],
        **fields_of(settings, plan),
        **summarize(seconds),  # type: ignore[arg-type]
    )


def _thin(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Keep the first and the last sample, and the largest of each chunk between them."""
    first, *between, last = samples
    size = ceil(len(between) / _MOST_SAMPLES) or 1
    chunks = [between[i : i + size] for i in range(0, len(between), size)]
    return [first, *(max(chunk, key=lambda sample: sample[1]) for chunk in chunks), last]
