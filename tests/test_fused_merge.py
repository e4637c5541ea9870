import subprocess
import sys

import pytest
import torch
from support.exact import assert_tracks_exact

from cqs.partial import Partial, RunningMerge, lse_dtype
from cqs.partial.fused_merge import merge_rows, sum_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_partial(rows, dtype, device):
    """A partial as a kernel returns it: a slice of the outputs of a whole launch."""
    output = torch.randn(2, 3, rows + 20, 24, dtype=dtype, device=device)
    lse = 5 * torch.randn(2, 3, rows + 20, device=device)
    return Partial(output[:, :, 7 : 7 + rows], lse[:, :, 7 : 7 + rows])


def merged_one_by_one(parts, rows, dtype, device):
    output = torch.empty(2, 3, rows, 24, dtype=dtype, device=device)
    lse = torch.empty(2, 3, rows, dtype=lse_dtype(dtype), device=device)
    merge = RunningMerge(Partial(output, lse))
    for partial, where in parts:
        merge.add(partial, where)
    return merge.finish()


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_one_kernel_merges_as_one_by_one(num_parts, dtype, device):
    parts = [(random_partial(50, torch.float32, device), slice(None)) for _ in range(num_parts)]
    parts.append((random_partial(20, dtype, device), slice(30, 50)))
    parts[0][0].lse[0, 0, :5] = -torch.inf
    parts[0][0].output[0, 0, :5] = 0
    expected = merged_one_by_one(parts, 50, dtype, device)
    answer = Partial(*(torch.full_like(each, torch.nan) for each in expected))
    merge_rows(answer, parts)
    exact = merged_one_by_one(
        [(Partial(p.output.double(), p.lse.double()), rows) for p, rows in parts],
        50,
        torch.float64,
        device,
    )
    assert_tracks_exact(answer.output, expected.output, exact.output)
    torch.testing.assert_close(answer.lse, expected.lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_one_kernel_sums_as_one_by_one(num_parts, dtype, device):
    whole = [random_partial(50, torch.float16, device).output for _ in range(num_parts)]
    parts = [(each, slice(0, 50)) for each in whole]
    strided = torch.randn(2, 3, 24, 20, device=device).mT
    parts.append((strided, slice(30, 50)))
    whole[0][:, :, 3] = torch.nan
    expected = torch.zeros(2, 3, 60, 24, device=device)
    expected[:, :, :50] = sum(each.float() for each in whole)
    expected[:, :, 30:50] += strided
    memory = torch.full((2, 3, 70, 24), torch.nan, dtype=dtype, device=device)
    sum_rows(memory[:, :, 5:65], parts)
    found = memory[:, :, 5:65]
    torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert memory[:, :, :5].isnan().all() and memory[:, :, 65:].isnan().all()


def merged(parts, device):
    """Merge all rows of some partials into an answer with other content."""
    answer = random_partial(10, torch.float32, device)
    merge_rows(answer, [(part, slice(None)) for part in parts])
    return answer


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_nothing_answers_are_empty(device):
    """Whatever a part holds there."""
    bad, good, answer = (random_partial(rows, torch.float32, device) for rows in (10, 10, 20))
    for row, garbage in enumerate((0, 7, torch.inf, torch.nan)):
        bad.output[:, :, row], bad.lse[:, :, row] = garbage, -torch.inf
    merge_rows(answer, [(bad, slice(0, 10)), (bad, slice(0, 10))])
    for empty in (slice(0, 4), slice(10, 20)):
        assert (answer.output[:, :, empty] == 0).all()
        assert (answer.lse[:, :, empty] == -torch.inf).all()
    assert answer.output[:, :, 4:].isfinite().all()
    for parts in ([good, bad], [bad, good]):
        for found, right in zip(merged(parts, device), good, strict=True):
            assert torch.equal(found[:, :, :4], right[:, :, :4])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_row(device):
    first, second = (random_partial(10, torch.float32, device) for _ in range(2))
    first.output[:, :, 4] = torch.nan
    first.lse[:, :, 4] = torch.nan
    answer = merged([first, second], device)
    broken = answer.output.isnan().all(-1)
    assert broken[:, :, 4].all() and broken.sum() == broken[:, :, 4].numel()
    assert answer.lse[:, :, 4].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", range(5))
def test_parts_may_start_anywhere_in_memory(first, device):
    """And have any strides."""
    part, other = (random_partial(10, torch.float32, device) for _ in range(2))
    memory = torch.empty(first + 60, device=device)
    moved = other._replace(lse=memory[first:].view(2, 3, 10).copy_(other.lse))
    expected = merged([part, other], device)
    assert all(map(torch.equal, merged([part, moved], device), expected))
    moved = moved._replace(output=other.output.mT.contiguous().mT)
    torch.testing.assert_close(merged([part, moved], device), expected)


FORKS = """
import os, threading, time, torch
from cqs.partial import Partial, merge_partials
torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
part = Partial(torch.randn(1, 8, 1500, 64), torch.randn(1, 8, 1500))
thread = threading.Thread(target=merge_partials, args=([part, part],))
thread.start()
while thread.is_alive():
    if not (child := os.fork()):
        merge_partials([part, part])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_children_that_are_forked_during_a_first_merge_merge_too():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=300)
