"""Joint tokens give the attention of the whole sequence, wherever their rows are computed."""

import re

import pytest
import torch
import torch.distributed as dist
from programs import NAMES, count_bytes, cut, largest_errors, raised
from sparse_cases import NAMES as PATTERN_NAMES
from sparse_cases import with_pattern
from support.options import grouped
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cqs
from benchmarks.cases import Case
from cqs.distributed import JointTokens
from cqs.scheduler.head_groups import possible_head_parallel

pytestmark = pytest.mark.slow

CASES = (
    Case("square", 47, 47, 4, 4, head_dim=8, batch=2),
    Case("gqa", 47, 47, 4, 2, head_dim=8),
    Case("causal", 47, 47, 4, 1, head_dim=8, is_causal=True),
    Case("cross", 40, 61, 4, 2, head_dim=8),
    Case("few", 6, 6, 2, 2, head_dim=8),
)
JOINT_NAMES = [f"joint_{name}" for name in NAMES]


@pytest.mark.parametrize("num_ranks", range(1, 5))
def test_every_world_is_exact(ranks, num_ranks):
    """Also with patterns, and where joint tokens are not passed or are none."""
    problems = []
    for seed, joint in enumerate([(3, 3), (0, 0), (5, 5), (None, 4), (3, None)]):
        for number, case in enumerate(CASES):
            degrees = possible_head_parallel(num_ranks, case.num_heads, case.num_kv_heads)
            options = {"head_parallel": degrees[seed % len(degrees)], "num_chunks": 1 + seed % 2}
            lengths = case.seqlen_q - (joint[0] or 0), case.seqlen_kv - (joint[1] or 0)
            cuts = cut(lengths, num_ranks, seed)
            position = ("front", "rear")[(seed + number) % 2]
            if number < 2:
                name = PATTERN_NAMES[(4 * number + 2 * seed + num_ranks) % len(PATTERN_NAMES)]
                case = with_pattern(case, name)
            problems.append((case, cuts, options, joint, position))
    for errors in ranks.run(num_ranks, largest_errors, problems):
        assert max(errors) < 1e-10


def joint_bytes_sent(group, number):
    """Return the bytes that this rank sends as messages in both passes.

    Args:
        group: The process group.
        number: Number of joint tokens beside 20 tokens of each rank.
    """
    tensors = [torch.randn(1, 2, 20, 8).requires_grad_() for _ in range(3)]
    joint = {name: torch.ones(1, 2, number, 8) for name in JOINT_NAMES}
    with count_bytes() as sent:
        options = grouped(joint | {"head_parallel": 1})
        cqs.distributed.attention(*tensors, group=group, **options).sum().backward()
    return sum(sent)


def test_every_rank_sends_its_part_of_the_joint_tokens(ranks):
    """Three of nine beside 20 rows: 15 % more, on every rank."""
    without, joined = (ranks.run(3, joint_bytes_sent, number) for number in (0, 9))
    assert min(without) > 0 and joined == [sent * 23 // 20 for sent in without]


def joint_dtensors(group):
    """Return whether results of DTensors, and the sums of their gradients, equal those of tensors.

    Joint tensors have a batch of 1, which the whole batch shares.
    """
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 2, 13, 8, generator=generator) for _ in range(3)]
    joint = [torch.randn(1, 2, 5, 8, generator=generator).requires_grad_() for _ in range(3)]
    shards = [each.chunk(dist.get_world_size(group), dim=2)[rank] for each in whole]
    expected = cqs.distributed.attention(*shards, group=group, joint=JointTokens(*joint))
    shares = torch.autograd.grad(expected.square().sum(), joint)
    for share in shares:
        dist.all_reduce(share, group=group)
    copies = [DTensor.from_local(each.detach(), mesh, [Replicate()]) for each in joint]
    copies = [each.requires_grad_() for each in copies]
    sharded = [distribute_tensor(each, mesh, [Shard(2)]) for each in whole]
    output = cqs.distributed.attention(*sharded, joint=JointTokens(*copies))
    gradients = torch.autograd.grad(output.square().sum(), copies)
    pairs = zip(gradients, shares, strict=True)
    return torch.equal(output, expected) and all(torch.equal(a.full_tensor(), b) for a, b in pairs)


def test_replicated_dtensors(ranks):
    assert ranks.run(3, joint_dtensors) == [True] * 3


def joint_tensors(number):
    """Return joint query, key and value by name."""
    shapes = [(2, heads, number, 16) for heads in (4, 2, 2)]
    return dict(zip(JOINT_NAMES, map(torch.zeros, shapes), strict=True))


def attend_changed(group, changed):
    """Attend with three joint tokens, of which rank 1 changes some arguments."""
    tensors = [torch.randn(2, heads, 8, 16) for heads in (4, 2, 2)]
    joint = joint_tensors(3) | (changed if dist.get_rank(group) == 1 else {})
    cqs.distributed.attention(*tensors, group=group, **grouped(joint))


FEWER = joint_tensors(2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (FEWER, r"JointRows\(position='front', queries=2, keys=2\), rank 0 has Joint.*queries=3"),
        ({"joint_position": "rear"}, "JointRows.position='rear'.* rank 0 has .*'front'"),
        (dict.fromkeys(FEWER), "queries=0, keys=0"),
        ({"joint_query": None}, "queries=0, keys=3"),
    ],
    ids=["numbers", "position", "forgotten", "no-queries"],
)
def test_ranks_with_other_joint_tokens_find_out(ranks, changed, message):
    for error, text in ranks.run(3, raised, attend_changed, changed):
        assert error is ValueError
        assert re.match("rank 1 of the group has joint tokens .*" + message, text)


def query(*shape, **options):
    return {"joint_query": torch.zeros(*shape, **options)}


BAD = {
    "position": ({"joint_position": "middle"}, ValueError, "joint.position .*'middle'"),
    "key-alone": ({"joint_value": None}, ValueError, "joint.value=None"),
    "value-alone": ({"joint_key": None}, ValueError, "joint.key=None"),
    "lengths": ({"joint_key": FEWER["joint_key"]}, ValueError, "joint.value .*joint.key, 2, got 3"),
    "heads": (query(2, 2, 3, 16), ValueError, r"joint.query .*\[2, 2, 3, 16\]"),
    "head_dim": (query(2, 4, 3, 8), ValueError, r"joint.query .*\[2, 4, 3, 8\]"),
    "batch": (query(3, 4, 3, 16), ValueError, "joint.query must be .2 or 1,"),
    "dtype": (query(2, 4, 3, 16, dtype=torch.float64), ValueError, "joint.query .*dtype .*float64"),
    "device": (query(2, 4, 3, 16, device="meta"), ValueError, "joint.query .*device .*meta"),
    "dimensions": (query(4, 3, 16), ValueError, r"joint.query .*\[4, 3, 16\]"),
    "joint": ({"joint": (1, 2)}, TypeError, "joint must be JointTokens or None, got .1, 2."),
    "type": ({"joint_query": [1.0]}, TypeError, "joint.query .* got list"),
    "sparse": ({"joint_query": torch.zeros(2, 4, 3, 16).to_sparse()}, ValueError, "joint.query .*"),
}


@pytest.mark.parametrize(("changed", "expected", "message"), BAD.values(), ids=BAD)
def test_bad_joint_tokens_are_named_on_every_rank(ranks, changed, expected, message):
    for rank, (error, text) in enumerate(ranks.run(2, raised, attend_changed, changed)):
        assert error is (expected if rank else ValueError) and re.search(message, text)
        assert rank or text.startswith("rank 1 of the group failed")
