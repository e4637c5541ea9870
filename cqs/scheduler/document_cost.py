"""The cost of plans of packed documents, and the choice among them.

In contrast to :mod:`cqs.scheduler.cost_model`, work and traffic are those of the placement itself:
moving rows from busy tasks to others costs their bytes and saves computation.
"""

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cqs.patterns.bound_documents import BoundDocuments
from cqs.scheduler.cost_model import Prediction, predict_passes
from cqs.scheduler.kinds import Documents
from cqs.scheduler.machines import Machine
from cqs.scheduler.placement import Placement, place_documents
from cqs.scheduler.workload import Workload

_TOLERANCES = (0.1, 0.3, 1.0)
"""Tolerances that are tried if it is much faster not to balance the tasks at all."""
_MOST_BALANCING = 1.5
"""Time of balanced tasks, relative to that of others, from which tasks are not balanced. Below, the
prediction of short exchanges, which latency dominates, is not accurate enough."""
_MOST_TRAFFIC = 1.1
"""Time of a head-parallel degree, relative to that of a higher one, from which the higher one is
taken, which moves more bytes."""


def predict_documents(
    workload: Workload,
    documents: BoundDocuments,
    shards: tuple[int, ...],
    key_shards: tuple[int, ...],
    machine: Machine,
    passes: str,
    *,
    tile: int,
    head_parallel: int | str = "auto",
) -> Prediction:
    """Predict the costs of attention over packed documents, with the best degree and tolerance.

    Args:
        workload: The attention problem, with the live pairs of ``documents``.
        documents: The live pairs.
        shards: Number of queries of every device.
        key_shards: Number of keys of every device.
        machine: Throughput and links of the devices.
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
        tile: Number of rows of a kernel's tile.
        head_parallel: Head-parallel degree, or ``"auto"`` for all that the heads support.
    """

    def predict(degree: int, tolerance: float) -> Prediction:
        held, key_held = (join_shards(lengths, degree) for lengths in (shards, key_shards))
        placement = place_documents(documents, held, key_held, tile, tolerance)
        predict_pass = partial(_predict_pass, workload, placement, machine, degree)
        kind = Documents(held, key_held, tolerance)
        return predict_passes(predict_pass, passes)._replace(kind=kind)

    balanced = workload.one_device_seconds(machine, passes) / len(shards)
    chosen = Prediction(math.inf, math.inf, math.inf)
    for degree in workload.list_degrees(len(shards), head_parallel):
        if chosen.seconds <= _MOST_TRAFFIC * balanced:
            break
        predict_with = partial(predict, degree)
        best = predict_with(Documents().tolerance)
        if best.seconds > _MOST_BALANCING * balanced:
            unmoved = predict_with(math.inf)
            if best.seconds > _MOST_BALANCING * unmoved.seconds:
                best = min(*map(predict_with, _TOLERANCES), unmoved, key=lambda one: one.seconds)
        if chosen.seconds > _MOST_TRAFFIC * best.seconds:
            chosen = best
    return chosen


def join_shards(lengths: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Return the lengths of as many consecutive shards together."""
    return tuple(sum(lengths[i : i + number]) for i in range(0, len(lengths), number))


def _predict_pass(
    workload: Workload, placement: Placement, machine: Machine, degree: int, *, is_backward: bool
) -> Prediction:
    """Predict the costs of the devices that have the most of each.

    Args:
        workload: The attention problem.
        placement: The tasks, each of ``degree`` devices.
        machine: Throughput and links of the devices.
        degree: Head-parallel degree.
        is_backward: Whether to predict the backward pass instead of the forward pass.
    """
    shape, loads = workload.part(degree), placement.live_pairs
    num_tasks = len(loads)
    chunks = workload.num_chunks(
        degree * num_tasks, degree, is_backward=is_backward, kind="documents", machine=machine
    )
    rows, keys = placement.moved
    row_bytes, key_bytes = rows * shape.query_bytes(1), keys * shape.key_bytes(1)

    whole = workload.seconds(machine, is_backward=is_backward, calls=0)
    per_row = workload.seconds(machine, is_backward=is_backward) - whole
    compute = whole * loads / max(loads.sum(), 1)
    compute = (compute + per_row * rows.sum(axis=0) / max(workload.tokens, 1)) / degree

    per_node = machine.devices_per_node
    node = np.arange(num_tasks) * degree // per_node
    near = np.asarray(node[:, None] == node, np.float64)
    far = 1 - near
    # The devices of a task exchange the rows that stay in it, each for its own heads.
    np.fill_diagonal(near, (min(degree, per_node) - 1) / degree)
    np.fill_diagonal(far, max(degree - per_node, 0) / degree)

    def exchange(moved: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of every task's exchange of bytes ``[holders, tasks]``."""
        inside, outside = (
            np.maximum(moved_bytes.sum(axis=0), moved_bytes.sum(axis=1)) / chunks
            for moved_bytes in (moved * near, moved * far)
        )
        return np.array(list(map(machine.exchange, inside.tolist(), outside.tolist())))

    inputs, outputs = row_bytes + key_bytes, row_bytes
    if is_backward:
        inputs, outputs = outputs, inputs
    send, send_back = exchange(inputs), exchange(outputs)
    seconds = np.maximum(compute, (chunks - 1) * (send + send_back)) + send + send_back
    held = (2 * row_bytes + key_bytes).sum(axis=0)
    moves = near + far
    received = (inputs * moves).sum(axis=0) + (outputs * moves).sum(axis=1)
    most = [float(costs.max()) for costs in (seconds, received, held)]
    return Prediction(most[0], most[1], most[2], degree)
