"""``python -m benchmarks packed``: lengths of documents, and what a row says of a plan."""

from benchmarks.packed import PackedSequence, moved_bytes, plan_rank
from cqs.patterns import documents
from cqs.scheduler import AttentionShape


def test_bytes_of_a_plan_are_those_of_its_routes():
    """One document begins in the shard before: its first 10 keys are sent, and nothing else."""
    case, shape = PackedSequence(4096, 2, 2), AttentionShape(32, 128, num_kv_heads=8)
    layout = plan_rank(documents([0, 2038, 4096]), case, 1)
    assert moved_bytes(layout, shape) == layout.plan.placement.moved_bytes(shape)
    assert moved_bytes(layout, shape) == shape.key_bytes(10)
