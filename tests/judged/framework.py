"""Run published cases of other projects: each passes, is refused with a reason, or fails.

An adaptor is a module with a function that returns a :class:`Suite`. It takes problems, expected
results and tolerances from the other project, and calls the public functions of cqs with the
options that the case names, also those that cqs does not support.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from unittest import SkipTest

import numpy as np
import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances

from cqs.report.table import Table

NUM_TASKS = 3
"""Number of tasks of every call, so that partial outputs are merged."""

REFUSALS = (
    (TypeError, r"^\w+\(\) does not support (\w+): ", r"\1"),
    (TypeError, r"^flex_attention\(\) got an unexpected keyword argument '(prob_mod)'", r"\1"),
    (NotImplementedError, r" of layer \d+: (\w+) is not supported$", r"\1"),
)
"""Errors by which cqs rejects an option: type, pattern of the message, name of the option."""


@dataclass(frozen=True)
class Case:
    """A published problem."""

    name: str
    check: Callable[[], None]
    """Computes the problem with cqs, and raises AssertionError if the result is wrong."""


@dataclass(frozen=True)
class Suite:
    """The cases of another project."""

    name: str
    version: str
    """Package or repository, with its version or commit."""
    cases: Iterable[Case]


@dataclass(frozen=True)
class Verdict:
    """What became of the cases of a suite; a row of the table."""

    suite: str
    version: str
    passed: int
    refused: dict[str, int]
    """Name of an option that cqs does not support -> number of cases."""
    failed: dict[str, str]
    """Name of a case -> its error."""

    @property
    def num_cases(self):
        """All cases, without those that the other project itself skips."""
        return self.passed + sum(self.refused.values()) + len(self.failed)


def reason_of(error):
    """Return the name of the option that an error of cqs rejects, or None for any other error."""
    for kind, pattern, option in REFUSALS:
        if isinstance(error, kind) and (found := re.search(pattern, str(error))):
            return found.expand(option)
    return None


def judge(suite):
    """Run all cases of a suite."""
    passed, refused, failed = 0, Counter[str](), dict[str, str]()
    for case in suite.cases:
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the other projects
                case.check()
        except SkipTest:
            continue
        except Exception as error:
            if reason := reason_of(error):
                refused[reason] += 1
                continue
            failed[case.name] = f"{type(error).__name__}: {error}"
        else:
            passed += 1
    return Verdict(suite.name, suite.version, passed, dict(refused), failed)


def assert_close(found, expected, *, rtol, atol):
    """Compare tensors or arrays by the rule of NumPy and PyTorch; dtypes and shapes must agree.

    Args:
        found: Results of cqs.
        expected: Results of the other project.
        rtol: Allowed error relative to the expected value.
        atol: Allowed absolute error, added to the relative one.
    """
    assert len(found) == len(expected) > 0
    for got, want in zip(map(as_tensor, found), map(as_tensor, expected), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


def assert_as_exact_as(compute, reference, operands, tolerance=None):
    """Compare output and gradients of two functions by the rule of PyTorch's attention tests.

    The reference in float64 is exact. Errors are within the tolerance, or their mean is at most
    that of the reference in the dtype of the operands, times 2 in half precision, otherwise 10.
    PyTorch's tests allow 10 in float32, and of fused kernels in half precision 3 to 180. The
    largest error may be three times as many times that of the reference: the mean hides a wrong
    row.

    Args:
        compute: Function of cqs.
        reference: Function of the other project.
        operands: Tensors whose gradients are compared.
        tolerance: Relative and absolute; the default is that of ``torch.testing``.
    """
    dtype = operands[0].dtype
    found, eager, exact = (
        with_gradients(function, [each.detach().to(of).requires_grad_() for each in operands])
        for function, of in ((compute, dtype), (reference, dtype), (reference, torch.float64))
    )
    assert all(each.dtype == dtype for each in found)
    assert_tracks(found, eager, exact, tolerance or default_tolerances(dtype))


def assert_tracks(found, eager, exact, tolerance):
    """Apply the rule of :func:`assert_as_exact_as` to results.

    Args:
        found: Output and gradients by cqs.
        eager: The same by the reference, in the same dtype.
        exact: The same by the reference in float64.
        tolerance: Relative and absolute.
    """
    rtol, atol = tolerance
    for number, (got, rounded, want) in enumerate(zip(found, eager, exact, strict=True)):
        name = f"gradient {number - 1}" if number else "output"
        assert got.shape == want.shape, f"{name}: {got.shape}"
        error = (got - want).abs()
        if not (error <= atol + rtol * want.abs()).all():
            factor = 2 if got.dtype.itemsize == 2 else 10
            of_eager = (rounded - want).abs()
            for found_error, allowed in (
                (error.mean(), factor * of_eager.mean()),
                (error.max(), 3 * factor * of_eager.max()),
            ):
                assert found_error <= allowed, f"{name}: error {found_error:.3g} > {allowed:.3g}"


def with_gradients(function, operands):
    """Return the output of a function, and gradients for the same gradient of every output."""
    output = function(*operands)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad(output, operands, gradient.bfloat16().to(output.dtype))
    return output.detach(), *gradients


def heads_first(function):
    """Return a function of ``[batch, tokens, heads, head_dim]`` by one whose heads come first."""

    def of_tokens_first(*operands, **options):
        return function(*(each.transpose(1, 2) for each in operands), **options).transpose(1, 2)

    return of_tokens_first


def replace_row(path, key, row):
    """Write a row of a file of JSON objects in place of the one with the same value of a key."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {each[key]: each for each in map(json.loads, lines)} | {row[key]: row}
    path.write_text("".join(json.dumps(each) + "\n" for each in rows.values()))


def as_tensor(values):
    """Return a tensor of the values of an array, or a tensor without its gradient."""
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which PyTorch does not read
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def format_verdicts(verdicts):
    """Lay out one line per suite, and the total."""
    rows, totals = [], Counter()
    for each in verdicts:
        options = ", ".join(f"{name} {number}" for name, number in sorted(each.refused.items()))
        counts = {"cases": each.num_cases, "passed": each.passed, "failed": len(each.failed)}
        totals.update(counts)
        rows.append((each.suite, each.version, *counts.values(), options or "none"))
    header = ("suite", "version", *counts, "refused options")
    return str(Table(header, [*rows, ("total", "", *totals.values(), "")]))
