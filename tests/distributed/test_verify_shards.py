"""Verification of shards: one wrong rank makes all of them raise."""

import pytest
import torch
import torch.distributed as dist
from programs import ShardedProblem, raised
from sparse_cases import with_pattern

import cqs.distributed
from benchmarks.cases import Case
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.verify import VerificationError
from cqs.partial import Partial

pytestmark = pytest.mark.slow

SQUARE = Case("square", 67, 67, num_heads=4, num_kv_heads=2, batch=2)
CASES = {
    "dense": (SQUARE, {}),
    "pattern": (with_pattern(SQUARE, "longformer"), {}),
    "dropout": (SQUARE, {"dropout_p": 0.3, "seed": 5}),
}
CUTS = 2 * [[0, 0, 31, 67]]


def attend_with_an_error(group, case, options, field):
    """Verify a call in which two of three ranks have an error in output or LSE."""
    attend = RankTask.attend

    def corrupt(self, *arguments, **rest):
        attended = attend(self, *arguments, **rest)
        if dist.get_rank(group):
            attended[0][field][-1, -1, -1] += 0.1
        return attended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankTask, "attend", corrupt)
        ShardedProblem(group, case, CUTS, torch.float32).attend(verify=True, **options)


@pytest.mark.parametrize(("case", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("field", ["output", "lse"])
def test_one_wrong_rank_makes_all_ranks_raise(ranks, case, options, field):
    number = Partial._fields.index(field)
    found = ranks.run(3, raised, attend_with_an_error, case, options, number)
    start = f"rank 1 of the group: {field} of batch 1, head 3, row 30 deviates by 0.1"
    (error, text), *others = found
    assert error is VerificationError and text.startswith(start), found
    assert others == [(error, text)] * 2


def verify_in_a_capture(group):
    shard = torch.randn(1, 2, 4, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cqs.executors.distributed.attention.is_captured", lambda device: True)
        cqs.distributed.attention(shard, shard, shard, group=group, verify=True)


def test_a_captured_call_cannot_be_verified(ranks):
    for error, text in ranks.run(2, raised, verify_in_a_capture):
        assert error is ValueError and "verify must be False while a CUDA graph" in text
