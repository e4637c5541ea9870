"""Dilated patterns whose residues become heads for the backward kernel of five products."""

import pytest
import torch
import torch.nn.functional as F

from cqs.patterns import causal, dilated, from_mask, sliding_window, strided
from cqs.patterns.views import View
from cqs.worker.work import BlockRow, Work

pytest.importorskip("triton")

from cqs.worker.triton.residues import find_residues
from tests.worker.hopper import plan_work

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
    residues = find_residues(plan_work(*lengths, pattern=pattern), *lengths)
    assert residues.step == (4 if name in ("all", "causal", "window") else 3)
    shapes = (2, 6, lengths[0], 8), (2, 3, lengths[1], 8), (2, 3, lengths[1], 8)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    (view,) = residues.work.block_rows[0].views
    mask = mask_of(pattern, lengths)
    residue_mask = torch.zeros([length // residues.step for length in lengths], dtype=torch.bool)
    rows, columns = (slice(side.start, side.stop) for side in view[:2])
    residue_mask[rows, columns] = torch.from_numpy(view.to_mask())
    folded = [residues.fold(tensor, 3) for tensor in tensors]
    answer = F.scaled_dot_product_attention(*folded, attn_mask=residue_mask, enable_gqa=True)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(residues.unfold(answer, 3), expected)
    for tensor, residue_heads in zip(tensors, folded, strict=True):
        assert torch.equal(residues.unfold(residue_heads, 3), tensor)


def test_heads_of_their_own_are_not_copied():
    residues = find_residues(plan_work(240, 240, pattern=dilated(240, 240, 4)), 240, 240)
    for tensor in (torch.zeros(2, 3, 240, 8), torch.zeros(1, 240, 3, 8).transpose(1, 2)):
        assert residues.fold(tensor, 3).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("pattern", "lengths", "num_tasks"),
    [
        (None, (240, 240), 1),
        (sliding_window(10, 10), (240, 240), 1),
        (strided(16), (240, 240), 1),
        (dilated(240, 240, 4), (242, 242), 1),
        (dilated(240, 240, 4), (240, 240), 3),
        (dilated(240, 240, 4) | sliding_window(10, 10), (240, 240), 1),
        (from_mask(torch.arange(240)[:, None] * torch.arange(240) % 7 < 3), (240, 240), 1),
    ],
    ids=str,
)
def test_other_pairs_have_no_residues(pattern, lengths, num_tasks):
    work = plan_work(*lengths, pattern=pattern, num_tasks=num_tasks)
    assert find_residues(work, *lengths) is None


@pytest.mark.parametrize(
    ("reach", "step", "is_faster"),
    [(16_384, 8, True), (16_384, 16, False), (1000, 4, True), (200, 4, False)],
)
def test_residues_are_heads_if_queries_see_many_keys(reach, step, is_faster):
    work = plan_work(16_384, 16_384, pattern=dilated(reach, reach, step))
    assert find_residues(work, 16_384, 16_384).is_faster is is_faster


def test_empty_views_have_no_residues():
    views = tuple([View(range(0, 0, 2), range(0, 0, 2)), View(range(1, 1, 2), range(1, 1, 2))])
    assert find_residues(Work((BlockRow(range(0), views),)), 0, 0) is None


def test_a_residue_of_one_row_unfolds_to_contiguous_memory():
    residues = find_residues(plan_work(240, 240, pattern=dilated(240, 240, 4)), 240, 240)
    tensor = torch.randn(2, 3, 4, 8)
    unfolded = residues.unfold(residues.fold(tensor, 1), 1)
    assert torch.equal(unfolded, tensor) and unfolded.is_contiguous()
