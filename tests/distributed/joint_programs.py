"""What ranks run with joint tokens, compared with attention of the whole sequence in float64."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from score_cases import define, relative
from support.exact import assert_tracks_exact, eager_output, exact_answer
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cqs.distributed


class JointProblem:
    """A case whose first or last tokens are joint, and the shards of a rank of the others."""

    def __init__(self, group, case, cuts, joint, position, dtype, device="cpu"):
        """Divide the tensors; ``joint`` has the numbers of joint queries and keys, or None."""
        self.group, self.is_front = group, position == "front"
        self.problem = case.make(dtype, device)
        self.numbers = [joint[0] or 0, joint[1] or 0, joint[1] or 0]
        self.rank = dist.get_rank(group)
        marks = cuts[0], cuts[1], cuts[1]
        self.tensors, self.rows = [], []
        for tensor, number, ends in zip(self._whole, self.numbers, marks, strict=True):
            rows = range(*ends[self.rank : self.rank + 2])
            first = number if self.is_front else 0
            self.rows.append([first + row for row in rows])
            self.tensors.append(tensor[:, :, self.rows[-1]].requires_grad_())
        given = (joint[0], joint[1], joint[1])
        self.joint_rows = [
            list(range(n) if self.is_front else range(t.shape[2] - n, t.shape[2]))
            for t, n in zip(self._whole, self.numbers, strict=True)
        ]
        self.joint = [
            None if n is None else t[:, :, rows].requires_grad_()
            for t, n, rows in zip(self._whole, given, self.joint_rows, strict=True)
        ]
        names = "joint_query", "joint_key", "joint_value"
        self.arguments = dict(zip(names, self.joint, strict=True)) | {
            "group": group,
            "is_causal": case.is_causal,
            "pattern": case.pattern,
            "scale": case.scale,
            "joint_position": position,
        }
        self.own = [*self.joint_rows[0], *self.rows[0]]
        if not self.is_front:
            self.own = [*self.rows[0], *self.joint_rows[0]]

    @property
    def _whole(self):
        return self.problem.query, self.problem.key, self.problem.value

    def grad_of(self, rank, device="cpu"):
        """Return the gradient of the output of a rank, of all rows; those of other ranks are 0."""
        shape = *self.problem.query.shape[:3], self.problem.value.shape[3]
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    def gradients(self, output):
        """Return the gradients of shards, and the sums of those of joint tokens over all ranks."""
        grad = self.grad_of(self.rank, output.device)[:, :, self.own].to(output.dtype)
        leaves = [*self.tensors, *(each for each in self.joint if each is not None)]
        found = list(torch.autograd.grad(output, leaves, grad))
        shares = found[3:]
        for i, share in enumerate(shares):
            total = share.double().contiguous()  # gloo adds up memory, whatever its strides
            dist.all_reduce(total, group=self.group)
            shares[i] = total.to(share.dtype)
        return found[:3] + shares

    def expected(self, dtype, cuts):
        """Return output, gradients and LSE of one process, for this rank's rows."""
        whole = [each.detach().to(dtype).requires_grad_() for each in self._whole]
        given = replace(self.problem, **dict(zip(("query", "key", "value"), whole, strict=True)))
        exact = exact_answer(given) if dtype == torch.float64 else None
        output = eager_output(given) if exact is None else exact.output
        grad, first = torch.zeros_like(output), self.numbers[0] if self.is_front else 0
        for rank in range(dist.get_world_size(self.group)):
            start, stop = cuts[0][rank : rank + 2]
            rows = [*self.joint_rows[0], *range(first + start, first + stop)]
            grad[:, :, rows] += self.grad_of(rank, grad.device)[:, :, rows].to(grad.dtype)
        gradients = torch.autograd.grad(output, whole, grad)
        found = [output[:, :, self.own]]
        found += [each[:, :, rows] for each, rows in zip(gradients, self.rows, strict=True)]
        found += [
            each[:, :, rows]
            for each, rows, given in zip(gradients, self.joint_rows, self.joint, strict=True)
            if given is not None
        ]
        return found, exact and exact.lse[:, :, self.own]


def largest_joint_errors(group, problems):
    """Return the largest errors of float64 results of each problem."""
    return [_largest_error(group, *problem) for problem in problems]


def _largest_error(group, case, cuts, joint, position, options):
    at = JointProblem(group, case, cuts, joint, position, torch.float64)
    output, lse = cqs.distributed.attention(*at.tensors, **at.arguments, return_lse=True, **options)
    exact, exact_lse = at.expected(torch.float64, cuts)
    found = [output, *at.gradients(output), lse]
    return max(_difference(*pair) for pair in zip(found, [*exact, exact_lse], strict=True))


def _difference(found, exact):
    assert found.shape == exact.shape and torch.equal(found.isinf(), exact.isinf())
    difference = (found - exact).detach().nan_to_num(0).abs()
    return float(difference.max()) if difference.numel() else 0.0


def joint_score_errors(group, case, cuts, joint, position, names):
    """Return the errors of the LSE and of all gradients with options of the scores.

    The rows of a bias on every rank are those of its result.
    """
    at = JointProblem(group, case, cuts, joint, position, torch.float64)
    num_heads, *lengths = at.problem.query.shape[1], case.seqlen_q, case.seqlen_kv
    generator = torch.Generator().manual_seed(0)
    drawn = {"sinks": (num_heads,), "bias": (num_heads, *lengths), "table": (num_heads, 2048)}
    leaves = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in drawn.items()
        if name in names
    }
    given = {name: leaf for name, leaf in leaves.items() if name != "table"}
    if "table" in names:
        given["score_mod"] = relative(leaves["table"])
    if "slopes" in names:
        given["alibi_slopes"] = torch.rand(num_heads, generator=generator)
    whole = [each.detach().requires_grad_() for each in at._whole]
    fields = dict(zip(("query", "key", "value"), whole, strict=True))
    exact, exact_lse = define(replace(at.problem, **fields), cqs.Scores(**given))
    loss = (exact * at.grad_of(at.rank))[:, :, at.own].sum()
    wanted = torch.autograd.grad(loss, [*whole, *leaves.values()])
    if "bias" in names:
        given["bias"] = leaves["bias"][:, at.own]
    output, lse = cqs.distributed.attention(
        *at.tensors, **at.arguments, return_lse=True, scores=cqs.Scores(**given)
    )
    loss = (output * at.grad_of(at.rank)[:, :, at.own]).sum()
    shares = torch.autograd.grad(loss, [*at.tensors, *at.joint, *leaves.values()])
    found = [torch.zeros_like(each) for each in wanted]
    for total, rows, joint_rows, *parts in zip(
        found, at.rows, at.joint_rows, shares, shares[3:6], strict=False
    ):
        total[:, :, rows], total[:, :, joint_rows] = parts
    for total, share in zip(found[3:], shares[6:], strict=True):
        total.copy_(share)
    for each in (*found, *wanted):  # the losses of all ranks
        dist.all_reduce(each, group=group)
    pairs = [(lse, exact_lse[:, :, at.own]), (output, exact[:, :, at.own])]
    return [_difference(*pair) for pair in (*pairs, *zip(found, wanted, strict=True))]


def check_joint_tracks_exact(group, case, cuts, joint, position, dtype, device="cpu"):
    """Compare with float64 by the rule for rounding."""
    at = JointProblem(group, case, cuts, joint, position, dtype, device)
    output = cqs.distributed.attention(*at.tensors, **at.arguments)
    found = output, *at.gradients(output)
    eager, exact = (at.expected(each, cuts)[0] for each in (dtype, torch.float64))
    for number, each in enumerate(zip(found, eager, exact, strict=True)):
        assert_tracks_exact(*each, slack=4, name=f"result {number}")


def has_contiguous_copies(group, case, cuts, joint, position):
    """Return whether the joint rows that are sent are contiguous, as NCCL requires."""
    at = JointProblem(group, case, cuts, joint, position, torch.float32)
    send, sent = _functional_collectives.all_to_all_single_autograd, []

    def send_and_note(tensor, *arguments):
        sent.append(tensor.is_contiguous())
        return send(tensor, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_functional_collectives, "all_to_all_single_autograd", send_and_note)
        cqs.distributed.attention(*at.tensors, **at.arguments)
    return sent


def joint_bits(group, case, cuts, joint, position, options):
    """Return the output of this rank, and whether a prepared call and a replicated one equal it."""
    at = JointProblem(group, case, cuts, joint, position, torch.float32)
    output = cqs.distributed.attention(*at.tensors, **at.arguments, **options)
    given = {name: at.arguments.pop(name) for name in ("joint_query", "joint_key", "joint_value")}
    of_call = {name: options[name] for name in ("seed", "scores") if name in options}
    options.pop("seed", None)
    few = {name: each[:, :, :1] for name, each in given.items()}
    prepared_call = cqs.distributed.prepare(*at.tensors, **few, **at.arguments, **options)
    prepared = prepared_call(*at.tensors, **given, **of_call)
    gradients = [
        torch.autograd.grad(each.square().sum(), [*at.tensors, *given.values()])
        for each in (output, prepared)
    ]
    return output.detach(), torch.equal(output, prepared) and all(map(torch.equal, *gradients))


def joint_dtensors(group):
    """Return whether results of DTensors, and the sums of their gradients, equal those of tensors.

    Joint tensors have a batch of 1, which the whole batch shares.
    """
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 2, 13, 8, generator=generator) for _ in range(3)]
    joint = [torch.randn(1, 2, 5, 8, generator=generator).requires_grad_() for _ in range(3)]
    names = "joint_query", "joint_key", "joint_value"
    shards = [each.chunk(dist.get_world_size(group), dim=2)[rank] for each in whole]
    expected = cqs.distributed.attention(
        *shards, group=group, **dict(zip(names, joint, strict=True))
    )
    shares = torch.autograd.grad(expected.square().sum(), joint)
    for share in shares:
        dist.all_reduce(share, group=group)
    copies = [DTensor.from_local(each.detach(), mesh, [Replicate()]) for each in joint]
    copies = [each.requires_grad_() for each in copies]
    sharded = [distribute_tensor(each, mesh, [Shard(2)]) for each in whole]
    found = cqs.distributed.attention(*sharded, **dict(zip(names, copies, strict=True)))
    gradients = torch.autograd.grad(found.square().sum(), copies)
    pairs = zip(gradients, shares, strict=True)
    return torch.equal(found, expected) and all(torch.equal(a.full_tensor(), b) for a, b in pairs)


def count_joint_bytes(group, number):
    """Return the bytes that this rank sends as messages in both passes.

    Args:
        group: The process group.
        number: Number of joint tokens beside 20 tokens of each rank.
    """
    post, sent = dist.batch_isend_irecv, []

    def post_and_count(messages):
        sent.extend(each.tensor.nbytes for each in messages if each.op is dist.isend)
        return post(messages)

    tensors = [torch.randn(1, 2, 20, 8).requires_grad_() for _ in range(3)]
    names = "joint_query", "joint_key", "joint_value"
    joint = {name: torch.ones(1, 2, number, 8) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", post_and_count)
        output = cqs.distributed.attention(*tensors, **joint, group=group, head_parallel=1)
        output.sum().backward()
    return sum(sent)


def joint_complaint(group, of_rank, shapes, changed):
    """Return what is raised where one rank, or every rank for None, changes its joint tokens.

    Args:
        group: The process group.
        of_rank: The rank.
        shapes: Shapes of joint query, key and value.
        changed: Arguments of that rank.
    """
    tensors = [torch.randn(2, heads, 8, 16) for heads in (4, 2, 2)]
    names = "joint_query", "joint_key", "joint_value"
    given = {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=True)}
    if of_rank in (None, dist.get_rank(group)):
        given |= changed
    try:
        cqs.distributed.attention(*tensors, group=group, **given)
    except Exception as error:
        return type(error), str(error)
    return None


def check_captured_joint(group, case, cuts, joint):
    """Compare a replay of a CUDA graph, after new values of all tensors, with a call."""
    at = JointProblem(group, case, cuts, joint, "front", torch.bfloat16, "cuda")
    leaves = [*at.tensors, *at.joint]

    def attend():
        output = cqs.distributed.attention(*at.tensors, **at.arguments)
        return output.detach(), *torch.autograd.grad(output, leaves, output.detach())

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    with torch.no_grad():
        for each in leaves:  # joint tokens stay the same on all ranks
            each.mul_(0.5)
    graph.replay()
    replayed = [each.clone() for each in captured]
    assert all(map(torch.equal, replayed, attend()))
