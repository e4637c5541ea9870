"""What ranks run: attention on their shards, compared with attention of the whole sequence."""

import random
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from support.exact import assert_tracks_exact, eager_output, exact_answer
from support.options import grouped
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import cqs.distributed
from cqs.worker import Worker

NAMES = "query", "key", "value"


def random_cuts(generator, lengths, num_ranks):
    """Cut queries and keys at random: some shards are empty."""
    return [
        [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        for length in lengths
    ]


def cut(lengths, num_ranks, seed):
    return random_cuts(random.Random(seed), lengths, num_ranks)


def cuts_of(case, num_ranks, seed):
    return cut((case.seqlen_q, case.seqlen_kv), num_ranks, seed)


def even_cuts(length, num_ranks):
    return 2 * [[length * rank // num_ranks for rank in range(num_ranks + 1)]]


def split_rows(length, number, position, marks):
    """Return the joint rows of a whole sequence, and the rows of each shard."""
    first = 0 if position == "front" else length - number
    joint = list(range(first, first + number))
    others = [row for row in range(length) if row not in joint]
    return joint, [others[start:stop] for start, stop in pairwise(marks)]


class ShardedProblem:
    """The tensors of a case: the first or last tokens may be joint, a rank has a shard of the rest.

    The gradient of the output is ``1 + rank`` times the same one on every rank.
    """

    def __init__(
        self,
        group,
        case,
        cuts,
        dtype=torch.float64,
        device="cpu",
        joint=(None, None),
        position="front",
    ):
        """Divide the tensors.

        Args:
            group: The process group.
            case: The case.
            cuts: First query, and first key, of every rank's shard, and the end of the last.
            dtype: The dtype of the tensors.
            device: Their device.
            joint: Numbers of joint queries and keys; ``None`` for tensors that are not passed.
            position: Position of the joint tokens, "front" or "rear".
        """
        self.group, self.rank = group, dist.get_rank(group)
        self.problem = case.make(dtype, device)
        self.whole = [getattr(self.problem, name) for name in NAMES]
        self.tensors, self.joint, self._leaf_rows = [], {}, []
        """Shards; joint tensors by name; of each of them, the tensor in ``whole`` and its rows."""
        rows_of_joint = []
        for side, (name, tensor) in enumerate(zip(NAMES, self.whole, strict=True)):
            number, marks = joint[min(side, 1)], cuts[min(side, 1)]
            together, of_ranks = split_rows(tensor.shape[2], number or 0, position, marks)
            self.tensors.append(tensor[:, :, of_ranks[self.rank]].requires_grad_())
            self._leaf_rows.append((side, of_ranks[self.rank]))
            if number is not None:
                self.joint[f"joint_{name}"] = tensor[:, :, together].requires_grad_()
                rows_of_joint.append((side, together))
            if not side:
                self._all_rows = [
                    together + own if position == "front" else own + together for own in of_ranks
                ]
        self._leaf_rows += rows_of_joint
        self.rows = self._all_rows[self.rank]
        """Rows of the whole sequence that this rank's result has."""
        self.arguments = {
            "group": group,
            "is_causal": case.is_causal,
            "pattern": case.pattern,
            "scale": case.scale,
            "joint_position": position,
        }
        generator = torch.Generator().manual_seed(1)
        shape = *self.problem.query.shape[:3], self.problem.value.shape[3]
        self._grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    @property
    def leaves(self):
        return [*self.tensors, *self.joint.values()]

    def attend(self, **options):
        return cqs.distributed.attention(
            *self.tensors, **grouped(self.joint | self.arguments | options)
        )

    def gradients(self, output, **options):
        """Return the gradients of shards, and the sums of those of joint tokens over all ranks."""
        grad = (1 + self.rank) * self._grad[:, :, self.rows]
        found = torch.autograd.grad(output, self.leaves, grad.to(output.dtype), **options)
        sums = [each.double().contiguous() for each in found[3:]]
        for each in sums:  # gloo adds up memory, whatever its strides
            dist.all_reduce(each, group=self.group)
        return [*found[:3], *(each.to(output.dtype) for each in sums)]

    def of_one_process(self, dtype=torch.float64):
        """Return (output or gradient of all rows, this rank's rows); and the LSE in float64."""
        whole = [each.detach().to(dtype).requires_grad_() for each in self.whole]
        problem = replace(self.problem, **dict(zip(NAMES, whole, strict=True)))
        exact = exact_answer(problem) if dtype == torch.float64 else None
        output = eager_output(problem) if exact is None else exact.output
        factors = torch.zeros_like(self._grad[0, 0, :, :1])
        for rank, rows in enumerate(self._all_rows):
            factors[rows] += 1 + rank
        gradients = torch.autograd.grad(output, whole, (self._grad * factors).to(dtype))
        found = [(output, self.rows), *((gradients[side], rows) for side, rows in self._leaf_rows)]
        return found, exact and exact.lse[:, :, self.rows]

    def expected(self):
        """Return output and gradients of one process for this rank's rows, and the LSE."""
        found, lse = self.of_one_process()
        return [whole[:, :, rows] for whole, rows in found], lse


def difference(found, exact):
    """Return the largest difference of two tensors; infinity for NaN and for other infinities."""
    if found.shape != exact.shape or not torch.equal(found.isinf(), exact.isinf()):
        return torch.inf
    errors = (found - exact).detach().masked_fill(exact.isinf(), 0).abs().nan_to_num(torch.inf)
    return float(errors.max()) if errors.numel() else 0.0


def largest_error(group, case, cuts, options, joint=(None, None), position="front"):
    """Return the largest error of float64 results, relative to one process."""
    problem = ShardedProblem(group, case, cuts, joint=joint, position=position)
    output, lse = problem.attend(return_lse=True, **options)
    exact, exact_lse = problem.expected()
    found = [output, *problem.gradients(output), lse]
    return max(map(difference, found, [*exact, exact_lse]))


def largest_errors(group, problems):
    return [largest_error(group, *problem) for problem in problems]


def smallest_limit(compute, options):
    """Return the smallest limit of memory, which the error of too small a limit gives."""
    try:
        compute(options | {"max_bytes": 1})
    except ValueError as error:
        return int(re.search(r"max_bytes must be at least (\d+) .*, got 1$", str(error))[1])
    return 1


def check_tracks_exact(group, case, cuts, options, dtype, device="cpu", **joint):
    """Compare with float64 by the rule for rounding."""
    problem = ShardedProblem(group, case, cuts, dtype, device, **joint)
    output = problem.attend(**options)
    results = output, *problem.gradients(output)
    eager, exact = (problem.of_one_process(each)[0] for each in (dtype, torch.float64))
    for number, (result, (plain, _), right) in enumerate(zip(results, eager, exact, strict=True)):
        answer = within(*right, result)
        assert_tracks_exact(answer, plain, right[0], slack=4, name=f"result {number}")


def within(whole, rows, answer):
    """Return a result of all rows with those of an answer, whose error is compared with all."""
    if answer is None:
        return None
    filled = whole.clone().to(answer.dtype)
    filled[:, :, rows] = answer
    return filled


def bits(group, case, cuts, options, device="cpu", dtype=torch.float32):
    """Return output and gradients as they are."""
    problem = ShardedProblem(group, case, cuts, dtype, device)
    output = problem.attend(**options)
    return [each.detach().cpu() for each in (output, *problem.gradients(output))]


def deviating_calls(group, number, *arguments):
    """Return which of some equal calls have other bits than the first."""
    first, *others = (bits(group, *arguments) for _ in range(number))
    return [i for i, each in enumerate(others) if not all(map(torch.equal, each, first))]


@contextmanager
def count_bytes():
    """Yield a list to which the bytes of all messages are added that this rank sends."""
    post, sent, tags = dist.batch_isend_irecv, [], set()

    def post_and_count(messages):
        sends = [each.op is dist.isend for each in messages]
        assert sends == sorted(sends), "gloo is slow unless receives are posted first"
        tags.update(each.tag for each in messages)
        sent.extend(each.tensor.nbytes for each in messages if each.op is dist.isend)
        return post(messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", post_and_count)
        yield sent
    assert len(tags) <= 2, "messages of a pass have the number of its agreement"


def fail(*arguments, **options):
    """Stand for a function that runs out of memory."""
    raise torch.OutOfMemoryError("as if")


def fail_in_computation(patch):
    """Have the next computations fail, after the ranks have agreed."""
    for name in ("run_together", "run_steps"):
        patch.setattr(Worker, name, fail)


def raised(group, program, *arguments, **options):
    """Return type and text of the error that a program raises, or None."""
    try:
        program(group, *arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return None


def complaint(group, of_rank, changed, options, rows=8, device="cpu"):
    """Return what is raised where one rank passes other options, tensors or nothing at all."""
    tensors = [torch.randn(1, 4, rows, 16, device=device) for _ in range(3)]
    if changed and dist.get_rank(group) == of_rank:
        options = options | changed
    tensors = options.pop("tensors", tensors)
    return raised(group, attend, tensors, options)


def attend(group, tensors, options):
    return cqs.distributed.attention(*tensors, group=group, **grouped(options))


def as_dtensor(tensor, group):
    return DTensor.from_local(tensor, DeviceMesh.from_group(group, "cpu"), [Shard(2)])
