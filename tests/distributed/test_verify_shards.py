"""Verification of shards: right results pass, and one wrong rank makes all of them raise."""

import pytest
import torch
import torch.distributed as dist
from programs import ShardedProblem
from sparse_cases import with_pattern

import cqs.distributed
from benchmarks.cases import Case
from cqs.executors.distributed.rank_task import RankTask
from cqs.executors.verify import VerificationError
from cqs.patterns import causal, per_head, sliding_window, strided

pytestmark = pytest.mark.slow

SQUARE = Case("square", 67, 67, num_heads=4, num_kv_heads=2, batch=2)
CROSS = Case("cross", 40, 90, num_heads=4, num_kv_heads=4, is_causal=True)
PER_HEAD = per_head([[causal(), strided(5), sliding_window(9, 0), sliding_window(9, 0)]])
CASES = {
    "dense": (SQUARE, {}),
    "causal-cross": (CROSS, {"num_chunks": 2, "return_lse": True}),
    "pattern": (with_pattern(SQUARE, "longformer"), {}),
    "per-head": (Case("heads", 67, 67, 4, 2, pattern=PER_HEAD), {"return_lse": True}),
    "dropout": (SQUARE, {"dropout_p": 0.3, "seed": 5}),
    "dropout-per-head": (Case("heads", 67, 67, 4, 2, pattern=PER_HEAD), {"dropout_p": 0.2}),
}
MARKS = ([0, 0, 31, 67], [0, 40, 40, 67]), ([0, 9, 40, 40], [0, 1, 60, 90])


def attend_verified(group, case, marks, dtype, options, wrong=()):
    """Return the error of verification on this rank, after an error in a row of some ranks."""
    attend = RankTask.attend

    def corrupt(self, *arguments, **rest):
        attended = attend(self, *arguments, **rest)
        if dist.get_rank(group) in wrong:
            attended[0][wrong[dist.get_rank(group)]][-1, -1, -1] += 0.1
        return attended

    RankTask.attend = corrupt
    try:
        ShardedProblem(group, case, marks, dtype).attend(verify=True, **options)
    except VerificationError as error:
        return str(error)
    finally:
        RankTask.attend = attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_right_results_pass(ranks, name, dtype):
    case, options = CASES[name]
    found = ranks.run(3, attend_verified, case, MARKS[case is CROSS], dtype, options)
    assert found == [None] * 3


@pytest.mark.parametrize("name", ["dense", "pattern", "dropout"])
@pytest.mark.parametrize(("field", "name_of_field"), [(0, "output"), (1, "lse")])
def test_one_wrong_rank_makes_all_ranks_raise(ranks, name, field, name_of_field):
    case, options = CASES[name]
    wrong = {1: field, 2: field}
    found = ranks.run(3, attend_verified, case, MARKS[0], torch.float32, options, wrong)
    start = f"rank 1 of the group: {name_of_field} of batch 1, head 3, row 30 deviates by 0.1"
    assert len(set(found)) == 1 and found[0].startswith(start), found


def error_in_a_capture(group):
    shard = torch.randn(1, 2, 4, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cqs.executors.distributed.checked_call.is_captured", lambda device: True)
        with pytest.raises(ValueError, match="verify must be False while a CUDA graph") as raised:
            cqs.distributed.attention(shard, shard, shard, group=group, verify=True)
    return str(raised.value)


def test_a_captured_call_cannot_be_verified(ranks):
    assert len(ranks.run(2, error_in_a_capture)) == 2
