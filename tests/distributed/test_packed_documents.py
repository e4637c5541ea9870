"""Packed documents under context parallelism: placement and traffic."""

import math
import random

import numpy as np
import pytest
from layouts import lay_out_all
from programs import even_cuts, random_cuts
from random_problems import TOLERANCES, random_documents

from cqs.patterns import documents, sliding_window
from cqs.scheduler import AttentionShape, Documents, Plan, make_plan
from cqs.scheduler.head_groups import possible_head_parallel
from cqs.scheduler.machines import MACHINES


def test_plans_of_documents_are_valid():
    generator = random.Random(0)
    for _ in range(300):
        (pattern, lengths), num_tasks = random_documents(generator, 300), generator.randint(1, 9)
        kind = Documents(tolerance=generator.choice(TOLERANCES))
        if generator.random() < 0.5:
            cuts = random_cuts(generator, lengths, num_tasks)
            kind = Documents(*(tuple(np.diff(each).tolist()) for each in cuts), kind.tolerance)
        tile = generator.choice([1, 16])
        plan = make_plan(*lengths, num_tasks=num_tasks, kind=kind, tile=tile, pattern=pattern)
        plan.validate()
        assert Plan.from_json(plan.to_json(list_tasks=True), pattern) == plan
        placement = plan.placement
        assert [task.live_pairs for task in plan.tasks] == placement.live_pairs.tolist()
        if math.isinf(kind.tolerance):
            moved, _ = placement.moved
            assert moved.sum() == moved.trace()
        else:
            mean, widest = placement.live_pairs.mean(), max(lengths[1], 1)
            most = (1 + kind.tolerance + 0.01) * mean + widest
            assert placement.live_pairs.max() <= most, (kind, pattern)


OPTIONS = {"plan": None, "tile": 128, "with_gradients": True, "machine": MACHINES["H200"]}


def test_documents_within_shards_stay_there():
    """Documents of equal length whose ends are ends of shards: nobody sends anything."""
    pattern = documents(range(0, 65537, 1024))
    for layout in lay_out_all(AttentionShape(8, 64), (8192,) * 8, pattern=pattern, **OPTIONS):
        assert isinstance(layout.plan.kind, Documents)
        assert layout.query_route.stays and layout.key_route.stays


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_long_document_is_divided_among_ranks_with_short_ones(with_gradients):
    """Every rank has its share of the work, and receives less than half of an all-gather's."""
    shape = AttentionShape(32, 128, num_kv_heads=8)
    pattern = documents([*range(0, 65536, 512), *range(65536 + 49152, 131073, 512)])
    options = OPTIONS | {"pattern": pattern, "with_gradients": with_gradients}
    layouts = lay_out_all(shape, (16384,) * 8, **options)
    loads = [sum(step.live_pairs for step in layout.steps) for layout in layouts]
    assert sum(loads) == layouts[0].plan.live_pairs
    assert max(loads) < 1.03 * sum(loads) / 8
    placement = layouts[0].plan.placement
    all_gather = 7 * shape.key_bytes(131072)
    assert placement.moved_bytes(shape) < all_gather / 2
    keys = sum(sum(each.key_route.receives) - each.key_route.lengths[each.rank] for each in layouts)
    assert keys == placement.moved[1].sum() - placement.moved[1].trace()


def test_keys_of_documents_are_received_once():
    """Routes have exactly the rows of the steps, with and without gradients."""
    generator = random.Random(1)
    for _ in range(40):
        pattern, lengths = random_documents(generator, 400)
        if lengths[0] != lengths[1]:
            continue
        num_ranks = generator.randint(1, 8)
        degrees = possible_head_parallel(num_ranks, 8, 4)
        options = OPTIONS | {
            "pattern": pattern,
            "head_parallel": generator.choice(degrees),
            "plan": Documents(tolerance=generator.choice([0.0, math.inf])),
            "with_gradients": generator.random() < 0.5,
            "tile": 1,
        }
        shape = AttentionShape(8, 16, num_kv_heads=4)
        shards = np.diff(even_cuts(lengths[0], num_ranks)[0]).tolist()
        for layout in lay_out_all(shape, tuple(shards), **options):
            read = {key for step in layout.steps for keys in step.keys for key in keys}
            held = {key for keys in layout.key_route.held for key in keys}
            assert held <= read
            assert read <= held | set(layout.keys)
            away = [step.queries for step in layout.split.away]
            assert [row for rows in layout.result_route.held for row in rows] == [
                row for rows in away for row in rows
            ]


def test_kinds_of_documents_are_checked():
    without, pattern = "kind must not be Documents without a pattern", documents([0, 20])
    for kind, of_plan, message in (
        ("documents", None, without),
        ("documents", sliding_window(3), without),
        (Documents((20,)), pattern, r"shards must be of 2 tasks, got \(20,\)"),
        (Documents((1, 2)), pattern, r"shards must have 20 tokens together, got \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(20, num_tasks=2, kind=kind, pattern=of_plan)
    with pytest.raises(ValueError, match="tolerance must be at least 0, got -1"):
        Documents(tolerance=-1)
    with pytest.raises(ValueError, match="kind must be Documents for a placement"):
        make_plan(20, num_tasks=2, pattern=pattern).placement  # noqa: B018
