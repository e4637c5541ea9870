"""Dilated patterns whose residues become heads for the backward kernel of five products."""

import pytest
import torch
import torch.nn.functional as F

import cqs
from cqs.patterns import causal, dilated, from_mask, sliding_window, strided
from cqs.patterns.views import View
from cqs.worker.operands import TaskOperands
from cqs.worker.work import BlockRow, Work

pytest.importorskip("triton")

from cqs.worker.triton import TRITON, launch, rectangle_launch, residues
from cqs.worker.triton.residues import find_residues
from tests.worker.test_hopper_rectangle import BF16, FP16, count_calls, make_tensors, plan_work
from tests.worker.test_hopper_visits import exact_gradients

DILATED = {
    "all": dilated(1200, 1200, 4),
    "causal": dilated(1200, 0, 4),
    "window": dilated(70, 30, 4),
    "masked": dilated(1200, 1200, 3) & causal(),
    "ahead": dilated(2, 300, 3),
}


def mask_of(pattern, lengths):
    return torch.from_numpy(pattern.bind(*lengths).to_mask())


@pytest.mark.parametrize("lengths", [(240, 240), (240, 1200), (1200, 240)], ids=str)
@pytest.mark.parametrize("name", DILATED)
def test_attention_of_the_residues_is_that_of_the_pattern(name, lengths):
    pattern = DILATED[name]
    found = find_residues(plan_work(*lengths, pattern=pattern), *lengths)
    assert found.step == (4 if name in ("all", "causal", "window") else 3)
    shapes = (2, 6, lengths[0], 8), (2, 3, lengths[1], 8), (2, 3, lengths[1], 8)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    (view,) = found.work.block_rows[0].views
    mask = mask_of(pattern, lengths)
    of_one = torch.zeros([length // found.step for length in lengths], dtype=torch.bool)
    rows, columns = (slice(side.start, side.stop) for side in view[:2])
    of_one[rows, columns] = torch.from_numpy(view.to_mask())
    folded = [found.fold(tensor, 3) for tensor in tensors]
    answer = F.scaled_dot_product_attention(*folded, attn_mask=of_one, enable_gqa=True)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found.unfold(answer, 3), expected)
    for tensor, of_residues in zip(tensors, folded, strict=True):
        assert torch.equal(found.unfold(of_residues, 3), tensor)


def test_heads_of_their_own_are_not_copied():
    found = find_residues(plan_work(240, 240, pattern=dilated(240, 240, 4)), 240, 240)
    for tensor in (torch.zeros(2, 3, 240, 8), torch.zeros(1, 240, 3, 8).transpose(1, 2)):
        assert found.fold(tensor, 3).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("pattern", "lengths"),
    [
        (None, (240, 240)),
        (sliding_window(10, 10), (240, 240)),
        (strided(16), (240, 240)),
        (dilated(240, 240, 4), (242, 242)),
        (dilated(240, 240, 4) | sliding_window(10, 10), (240, 240)),
        (from_mask(torch.rand(240, 240) < 0.5), (240, 240)),
    ],
    ids=str,
)
def test_other_pairs_have_no_residues(pattern, lengths):
    assert find_residues(plan_work(*lengths, pattern=pattern), *lengths) is None


@pytest.mark.parametrize(
    ("pattern", "is_faster"),
    [
        (dilated(16_384, 16_384, 8), True),
        (dilated(16_384, 16_384, 16), False),
        (dilated(16_384, 0, 4), True),
        (dilated(1000, 1000, 4), True),
        (dilated(200, 200, 4), False),
    ],
    ids=str,
)
def test_residues_are_heads_if_queries_see_many_keys(pattern, is_faster):
    work = plan_work(16_384, 16_384, pattern=pattern)
    assert find_residues(work, 16_384, 16_384).is_faster is is_faster


def test_three_tasks_together_have_no_residues():
    work = plan_work(240, 240, pattern=dilated(240, 240, 4), num_tasks=3)
    assert find_residues(work, 240, 240) is None


def test_empty_views_have_no_residues():
    views = tuple([View(range(0, 0, 2), range(0, 0, 2)), View(range(1, 1, 2), range(1, 1, 2))])
    assert find_residues(Work((BlockRow(range(0), views),)), 0, 0) is None


def test_a_residue_of_one_row_unfolds_to_contiguous_memory():
    found = find_residues(plan_work(240, 240, pattern=dilated(240, 240, 4)), 240, 240)
    tensor = torch.randn(2, 3, 4, 8)
    unfolded = found.unfold(found.fold(tensor, 1), 1)
    assert torch.equal(unfolded, tensor) and unfolded.is_contiguous()


# On a GPU


@pytest.fixture
def calls(monkeypatch):
    """Use the kernel for small tensors too, and return its calls: of rectangles and of visits."""
    made = [count_calls(monkeypatch, f"gradients_of_{name}") for name in ("rectangles", "visits")]
    for name in ("_MIN_PAIRS", "_MIN_PAIRS_OF_SEVERAL"):
        monkeypatch.setattr(rectangle_launch, name, 0)
    monkeypatch.setattr(rectangle_launch, "_MIN_VISITS", {64: 0, 128: 0})
    monkeypatch.setattr(residues, "_LEAST_KEYS", 0)
    monkeypatch.setattr(rectangle_launch, "_MOST_SPANNED", torch.inf)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(2400, 2400), (1200, 3600), (2412, 2412)], ids=str)
@pytest.mark.parametrize("name", DILATED)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"heads": 4}, BF16),
        ({"heads": 4, "kv_heads": 1, "batch": 2}, BF16),
        ({"heads": 4, "kv_heads": 2, "dim": 64, "dtype": FP16}, FP16),
        ({"heads": 6, "kv_heads": 3, "batch": 2, "is_transposed": True}, None),
    ],
    ids=str,
)
def test_gradients_are_near_float64(name, lengths, options, dtype, calls):
    pattern = DILATED[name]
    *tensors, grad_output = make_tensors(queries=lengths[0], keys=lengths[1], **options)
    operands = TaskOperands(*tensors, plan_work(*lengths, pattern=pattern), 0.1)
    answer = TRITON.attend(operands, is_united=True)
    found = TRITON.differentiate(operands, grad_output, *answer, dtype=dtype)
    expected = exact_gradients(*tensors, grad_output, 0.1, mask_of(pattern, lengths).cuda())
    assert sum(map(len, calls)) == 1
    for gradient, exact in zip(found, expected, strict=True):
        assert gradient.dtype == (dtype or torch.float32)
        assert gradient.shape == exact.shape
        assert gradient.is_contiguous()
        assert (gradient.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.gpu
def test_gradients_are_deterministic(calls, monkeypatch):
    *tensors, grad_output = make_tensors(16, 4096)
    work = plan_work(4096, 4096, pattern=dilated(4096, 4096, 4))
    operands = TaskOperands(*tensors, work, 0.1)
    answer = TRITON.attend(operands, is_united=True)

    def compute():
        return list(TRITON.differentiate(operands, grad_output, *answer, dtype=BF16))

    first = compute()
    for programs in (132, 131, 97, 64, 33) * 4:
        monkeypatch.setattr(launch, "num_processors", lambda _, programs=programs: programs)
        assert all(map(torch.equal, first, compute()))
    assert len(calls[0]) == 21


@pytest.mark.gpu
def test_attention_uses_the_kernel(calls):
    *tensors, grad_output = make_tensors(4, 1024)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    answer = cqs.attention(*leaves, backend="triton", pattern=dilated(1024, 1024, 4))
    torch.autograd.grad(answer, leaves, grad_output)
    assert calls[0]
    assert not calls[1]
