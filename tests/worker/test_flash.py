"""FlashAttention-4 against float64, where there are a Hopper GPU and the package."""

import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from support.exact import assert_tracks_exact, eager_output, exact_answer, tensors_of
from support.layouts import LAYOUTS

from benchmarks.cases import Case
from cqs.worker import flash
from cqs.worker.flash import FLASH
from cqs.worker.operands import Operands
from cqs.worker.reference import REFERENCE
from tests.worker import hopper

SQUARE = Case("square", 517, 517, 4, 4, 64)
KINDS = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def make(case, dtype=torch.bfloat16, **changes):
    """A problem on the GPU, if FlashAttention-4 takes it."""
    problem = replace(case.make(dtype, "cuda"), **changes)
    if reason := FLASH.why_not(*tensors_of(problem)):
        pytest.skip(f"flash {reason}")
    return problem


def operands_of(problem):
    return Operands(*tensors_of(problem), problem.is_causal, problem.scale)


def attend(problem):
    return FLASH.attend(operands_of(problem))


def differentiate(problem, grad_output, answer):
    return FLASH.differentiate(operands_of(problem), grad_output, *answer)


def exact_gradients(problem, grad_output):
    mask = hopper.mask_of(problem)
    return hopper.exact_gradients(*tensors_of(problem), grad_output, problem.scale, mask)


def assert_gradients_right(problem, grad_output, gradients):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors_of(problem)]
    query, key, value = leaves
    output = eager_output(replace(problem, query=query, key=key, value=value))
    eager = torch.autograd.grad(output, leaves, grad_output)
    exact = exact_gradients(problem, grad_output)
    for name, *results in zip(("query", "key", "value"), gradients, eager, exact, strict=True):
        assert_tracks_exact(*results, slack=3.0, name=f"gradient of {name}")


RECTANGLES = {
    "d32": Case("d32", 300, 517, 4, 4, 32),
    "d64-gqa": Case("d64-gqa", 517, 300, 8, 2, 64, batch=2),
    "d96": Case("d96", 300, 517, 4, 4, 96),
    "d128": Case("d128", 517, 300, 4, 4, 128, batch=2),
    "d128-gqa": Case("d128-gqa", 300, 517, 8, 2, 128),
    "d128-three-to-one": Case("d128-three", 300, 517, 6, 2, 128),
    "d160-one-kv-head": Case("d160", 300, 517, 4, 1, 160),
    "d256-gqa": Case("d256-gqa", 300, 517, 4, 2, 256),
    "two-queries": Case("two-queries", 2, 300, 4, 2, 64),
    "two-keys": Case("two-keys", 300, 2, 4, 2, 64),
    "short": Case("short", 7, 9, 4, 2, 64),
    "three-quarters-of-a-tile": Case("three-quarters", 192, 192, 4, 4, 128),
}


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECTANGLES)
def test_answers_and_gradients_are_right(assert_right, name, dtype, is_causal):
    case = RECTANGLES[name]
    if is_causal:
        case = replace(case, seqlen_kv=case.seqlen_q)
    problem = make(case, dtype, is_causal=is_causal)
    grad_output = torch.randn_like(problem.query)
    given = [tensor.clone() for tensor in (*tensors_of(problem), grad_output)]
    answer = attend(problem)
    assert_right(problem, answer)
    gradients = differentiate(problem, grad_output, answer)
    assert all(gradient.dtype == problem.query.dtype for gradient in gradients)
    assert_gradients_right(problem, grad_output, gradients)
    assert all(map(torch.equal, (*tensors_of(problem), grad_output), given))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1)], ids=str)
def test_one_query_or_key_is_right(assert_right, lengths):
    problem = make(replace(SQUARE, seqlen_q=lengths[0], seqlen_kv=lengths[1]))
    answer = attend(problem)
    assert_right(problem, answer)
    grad_output = torch.randn_like(problem.query)
    gradients = differentiate(problem, grad_output, answer)
    exact = exact_gradients(problem, grad_output)
    for one, other in zip(gradients, exact, strict=True):  # some are differences of equals
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.2, -0.2, 0.0], ids=str)
def test_gradients_of_rectangles_and_squares_add_up(monkeypatch, scale):
    problem = Case("cut", 1000, 1000, 4, 2, 32, batch=2).make(torch.float32)
    problem = replace(problem, is_causal=True, scale=scale)
    grad_output, exact = torch.randn_like(problem.query), exact_answer(problem)

    def reference(query_tensors, key_tensors, is_causal, scale):
        query, grad_output, output, lse = query_tensors
        operands = Operands(query, *key_tensors, is_causal, scale)
        return REFERENCE.differentiate(operands, grad_output, output, lse)

    monkeypatch.setattr(flash, "_gradients", reference)
    monkeypatch.setattr(flash, "_LONGEST_SQUARE", 256)
    gradients = differentiate(problem, grad_output, exact)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    for one, other in zip(gradients, exact_gradients(problem, grad_output), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["d64-gqa", "d128-gqa"])
@KINDS
def test_rows_that_see_no_key_contribute_nothing(monkeypatch, name, is_causal):
    """In the gradients of a rectangle, and of a causal square that is cut."""
    monkeypatch.setattr(flash, "_LONGEST_SQUARE", 256)
    case = replace(RECTANGLES[name], seqlen_q=1217, seqlen_kv=1217)
    problem = make(case, is_causal=is_causal)
    grad_output = torch.randn_like(problem.query)
    answer = attend(problem)
    blind = torch.zeros(1217, dtype=torch.bool, device="cuda")
    blind[[0, 5, 130, 1216]] = True
    answer.lse[:, :, blind] = -torch.inf
    gradients = differentiate(problem, grad_output, answer)
    assert all(map(torch.equal, differentiate(problem, grad_output, answer), gradients))
    assert (gradients[0][:, :, blind] == 0).all()
    seeing = grad_output.masked_fill(blind[:, None], 0)
    gradients = [gradient.to(problem.query.dtype) for gradient in gradients]
    assert_gradients_right(problem, seeing, gradients)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("num_keys", [192, 517])
def test_scores_of_ten_thousand_leave_gradients_finite(assert_right, num_keys, is_causal):
    problem = make(replace(SQUARE, seqlen_q=num_keys, seqlen_kv=num_keys), is_causal=is_causal)
    for sign in (1, -1):
        query = torch.full_like(problem.query, 25 * sign)
        extreme = replace(problem, query=query, key=torch.full_like(problem.key, 25), scale=0.25)
        answer = attend(extreme)
        assert_right(extreme, answer)
        gradients = differentiate(extreme, torch.ones_like(query), answer)
        assert all(gradient.isfinite().all() for gradient in gradients)
        sums = gradients[2].double().sum(2)  # every row hands out a weight of 1 in all
        torch.testing.assert_close(sums, torch.full_like(sums, num_keys), rtol=2e-2, atol=0)


@pytest.mark.gpu
def test_strides_of_the_tensors_do_not_matter_to_gradients():
    problem = make(replace(SQUARE, num_kv_heads=2), is_causal=True)
    grad_output, answer = torch.randn_like(problem.query), attend(problem)
    expected = differentiate(problem, grad_output, answer)
    not_aligned = {"not aligned": lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2]}
    for name, store in (LAYOUTS | not_aligned).items():
        query, key, value = map(store, tensors_of(problem))
        other = replace(problem, query=query, key=key, value=value)
        stored = store(answer.output), store(answer.lse[..., None])[..., 0]
        gradients = differentiate(other, store(grad_output), stored)
        for one, same in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, same, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads"), [(64, 2), (128, 16), (128, 4), (256, 8)], ids=str
)
def test_every_run_is_bitwise_identical(head_dim, num_kv_heads, is_causal):
    case = Case("bits", 3000, 3000, 16, num_kv_heads, head_dim, batch=2)
    problem = make(case, is_causal=is_causal)
    grad_output = torch.randn_like(problem.query)
    answer = attend(problem)
    first = differentiate(problem, grad_output, answer)
    for _ in range(20):
        assert all(map(torch.equal, attend(problem), answer))
        assert all(map(torch.equal, differentiate(problem, grad_output, answer), first))


@pytest.mark.parametrize(
    ("version", "is_importable", "reason"),
    [
        ("4.0.0b32", True, None),
        ("4.0.0b31", True, "requires flash-attn-4 from 4.0.0b32 to 4.0.0b36, got 4.0.0b31"),
        ("4.0.0", True, "requires flash-attn-4 from 4.0.0b32 to 4.0.0b36, got 4.0.0"),
        ("4.0.0b36", False, "cannot be imported: ModuleNotFoundError"),
        (None, False, "requires the package flash-attn-4, which is not installed"),
    ],
)
def test_only_versions_that_were_read_are_called(monkeypatch, version, is_importable, reason):
    def find(name):
        if version is None:
            raise flash.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(flash.metadata, "version", find)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if is_importable else None)
    why_not = flash._why_not_importable.__wrapped__()
    assert why_not is None if reason is None else reason in why_not


@pytest.mark.slow
def test_the_package_is_not_imported_without_need():
    script = """
import sys
sys.modules["flash_attn"] = None  # importing it fails
import torch, cqs
from cqs.worker import BACKENDS
tensor = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
cqs.attention(tensor, tensor, tensor, num_tasks=3)
print(BACKENDS["flash"].why_not(tensor, tensor, tensor))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "requires CUDA tensors, got cpu", done.stderr
