"""Prepared calls compute what calls compute, and are compared between ranks like them."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import ShardedProblem, cut, raised
from support.frames import count_frames
from support.options import grouped

import cqs.distributed
from benchmarks.cases import Case

pytestmark = pytest.mark.slow


def compare_prepared(group, case, options, num_joint):
    """Return whether prepared calls have the bits of calls.

    For some lengths, with and without gradients, and for other numbers of joint tokens than those
    that were prepared.
    """
    seed, are_alike, prepared = {"seed": 5} if "dropout_p" in options else {}, [], None
    for number in range(2):
        lengths = [length - (num_joint or 0) for length in (40, 60)]
        cuts, joint = cut(lengths, dist.get_world_size(group), number), (num_joint, num_joint)
        problem = ShardedProblem(group, case, cuts, torch.float32, joint=joint)
        options = problem.arguments | options
        place = {"joint_position": options.pop("joint_position")}
        few = {name: each[:, :, :1] for name, each in problem.joint.items()} | place
        few = grouped(few | options)
        prepared = prepared or cqs.distributed.prepare(*problem.tensors, **few)
        for has_gradients in (True, False):
            answers = []
            for call in (prepared, partial(cqs.distributed.attention, **options)):
                with torch.set_grad_enabled(has_gradients):
                    answer = call(*problem.tensors, **grouped(problem.joint | place), **seed)
                parts = list(answer) if isinstance(answer, tuple) else [answer]
                parts += problem.gradients(parts[0]) if has_gradients else []
                answers.append(parts)
            are_alike.append(all(map(torch.equal, *answers)))
    return are_alike


@pytest.mark.parametrize(
    ("case", "options", "num_joint"),
    [
        (Case("causal", 40, 60, 4, 2, is_causal=True), {"return_lse": True}, None),
        (Case("dropout", 40, 60, 4, 4), {"dropout_p": 0.3, "backend": "reference"}, 6),
    ],
    ids=lambda each: each.name if isinstance(each, Case) else "",
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_prepared_calls_are_bitwise_identical(ranks, num_ranks, case, options, num_joint):
    found = ranks.run(num_ranks, compare_prepared, case, options, num_joint)
    assert found == [[True] * 4] * num_ranks


def call_prepared(group, shape, dtype):
    """Call what was prepared; rank 1 has other tensors."""
    tensors = [torch.randn(1, 4, 8, 16) for _ in range(3)]
    call = cqs.distributed.prepare(*tensors, group=group)
    if dist.get_rank(group) == 1:
        tensors = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    call(*tensors)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "value"),
    [
        ("num_heads", (1, 2, 8, 16), torch.float32, "4, got 2"),
        ("head_dim", (1, 4, 8, 8), torch.float32, "16, got 8"),
        ("batch", (2, 4, 8, 16), torch.float32, "1, got 2"),
        ("dtype", (1, 4, 8, 16), torch.float64, "torch.float32, got torch.float64"),
    ],
)
def test_tensors_that_were_not_prepared_are_named_on_every_rank(ranks, name, shape, dtype, value):
    for rank, (error, text) in enumerate(ranks.run(3, raised, call_prepared, shape, dtype)):
        assert error is ValueError and f"{name} must be as prepared, {value}" in text
        assert rank == 1 or text.startswith("rank 1 of the group failed")


def prepare_causal_on_the_last(group):
    tensors, is_last = [torch.randn(1, 4, 8, 16) for _ in range(3)], dist.get_rank(group) == 2
    cqs.distributed.prepare(*tensors, group=group, is_causal=is_last)


def test_ranks_that_prepare_other_calls_find_out(ranks):
    for error, text in ranks.run(3, raised, prepare_causal_on_the_last):
        assert error is ValueError
        assert text.startswith("rank 2 of the group has is_causal True, rank 0 has False")


def frames_of_attention(group, has_gradients):
    """Return the numbers of functions and files of a repeated call."""
    tensors = [torch.randn(1, 4, 700, 32).requires_grad_(has_gradients) for _ in range(3)]

    def run_passes():
        output = cqs.distributed.attention(*tensors, group=group)
        if has_gradients:
            torch.autograd.grad(output, tensors, output.detach())

    with torch.set_grad_enabled(has_gradients):
        for _ in range(2):
            run_passes()
        return count_frames(run_passes)


@pytest.mark.parametrize(
    ("num_ranks", "has_gradients", "most"),
    [(1, False, (26, 11)), (2, False, (129, 19)), (2, True, (334, 23))],
)
def test_a_repeated_call_enters_few_functions(ranks, num_ranks, has_gradients, most):
    """What depends on the signature alone is not computed again."""
    for frames, files in ranks.run(num_ranks, frames_of_attention, has_gradients):
        assert frames <= most[0] and files <= most[1]
