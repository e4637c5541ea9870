"""Row copies: every element reaches its target, and nothing else changes."""

import random

import pytest
import torch

from cqs.executors.distributed.transport.exchange import RowCopy, copy_rows

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


def random_schedule(generator, num_tensors, heads, rows):
    """Cut target rows into pieces, each of any source rows and heads."""
    schedule = []
    for number in range(num_tensors):
        marks = sorted(generator.sample(range(1, rows), 3))
        for first, last in zip([0, *marks], [*marks, rows], strict=True):
            if generator.random() < 0.2:
                continue
            source_row = generator.randint(0, rows - (last - first))
            num_heads = generator.randint(1, heads)
            first_heads = [generator.randint(0, heads - num_heads) for _ in range(2)]
            of_rows = source_row, first, last - first
            schedule.append(RowCopy(number, *of_rows, *first_heads, num_heads))
    return tuple(schedule)


@pytest.mark.sample(3)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(7, 5), (130, 16), (200, 40)])
def test_one_kernel_does_what_copies_do(device, dtype, rows, dim):
    from cqs.executors.distributed.transport import fused_copies

    generator = random.Random(rows)
    for num_tensors in (1, 3):
        schedule = random_schedule(generator, num_tensors, 4, rows)
        drawn = torch.randn(2 * num_tensors, rows, 2, 4, dim, device=device).to(dtype)
        sources = [each.movedim(0, 2) for each in drawn[:num_tensors]]
        targets = [each.permute(1, 2, 0, 3).contiguous() for each in drawn[num_tensors:]]
        expected = [target.clone() for target in targets]
        fused_copies.copy_rows(sources, targets, schedule)
        for copy in schedule:
            source = sources[copy.tensor].narrow(1, copy.source_head, copy.num_heads)
            target = expected[copy.tensor].narrow(1, copy.target_head, copy.num_heads)
            piece = source.narrow(2, copy.source_row, copy.num_rows)
            target.narrow(2, copy.target_row, copy.num_rows).copy_(piece)
        assert all(map(torch.equal, targets, expected))
        again = [target.clone() for target in targets]
        copy_rows(sources, again, schedule)
        assert all(map(torch.equal, again, expected))
