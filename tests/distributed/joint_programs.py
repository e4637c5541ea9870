"""What ranks run with joint tokens, compared with attention of the whole sequence in float64."""

from dataclasses import replace

import torch
import torch.distributed as dist
from support.exact import eager_output, exact_answer

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
