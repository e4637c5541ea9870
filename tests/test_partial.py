import pytest
import torch

from cqs.partial import (
    Partial,
    RunningMerge,
    lse_dtype,
    merge_own,
    merge_partials,
    merge_rows,
    sum_rows,
)

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


@pytest.fixture(params=[1, 2**17], ids=["in loops", "by PyTorch"], autouse=True)
def least_elements(request, monkeypatch):
    """All merges by compiled loops, or none of these small ones."""
    monkeypatch.setattr("cqs.partial._LEAST_ELEMENTS", request.param)


ROWS = slice(None)


def empty_like(partial):
    """The partial of queries that see no key."""
    return Partial(torch.zeros_like(partial.output), torch.full_like(partial.lse, -torch.inf))


def random_partial(dtype=torch.float32, shape=(2, 3, 5, 4)):
    return Partial(torch.randn(shape, dtype=dtype), torch.randn(shape[:3], dtype=lse_dtype(dtype)))


@pytest.mark.parametrize("size", [1e4, -1e4, 8e4])
def test_huge_scores_neither_overflow_nor_vanish(size):
    partials = [random_partial() for _ in range(3)]
    small = [partial._replace(lse=partial.lse.double()) for partial in partials]
    expected = merge_partials([Partial(p.output.double(), p.lse) for p in small])
    shifted = [partial._replace(lse=(partial.lse + size)) for partial in partials]
    merged = merge_partials(shifted)
    tolerance = 4 * abs(size) * torch.finfo(torch.float32).eps
    largest = max(partial.output.abs().max().item() for partial in partials)
    torch.testing.assert_close(
        merged.output.double(), expected.output, rtol=0, atol=tolerance * largest
    )
    torch.testing.assert_close(merged.lse.double(), expected.lse + size, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_larger_of_two_far_scores_wins(dtype):
    low, high = random_partial(dtype), random_partial(dtype)
    low, high = low._replace(lse=low.lse - 1e4), high._replace(lse=high.lse + 1e4)
    for partials in ([low, high], [high, low]):
        merged = merge_partials(partials)
        assert torch.equal(merged.output, high.output) and torch.equal(merged.lse, high.lse)


@DTYPES
def test_empty_partials_are_ignored(dtype):
    partial = random_partial(dtype)
    nothing = empty_like(partial)
    for partials in ([partial, nothing], [nothing, partial], [nothing, nothing, partial, nothing]):
        merged = merge_partials(partials)
        assert torch.equal(merged.output, partial.output) and torch.equal(merged.lse, partial.lse)


def test_rows_are_empty_one_by_one():
    one, other = random_partial(), random_partial()
    for partial, row in ((one, 0), (other, 1), (one, 2), (other, 2)):
        partial.output[:, :, row], partial.lse[:, :, row] = 0, -torch.inf
    merged = merge_partials([one, other])
    assert torch.equal(merged.output[:, :, 0], other.output[:, :, 0])
    assert torch.equal(merged.output[:, :, 1], one.output[:, :, 1])
    assert (merged.output[:, :, 2] == 0).all() and (merged.lse[:, :, 2] == -torch.inf).all()
    assert merged.output.isfinite().all() and merged.lse[:, :, 3:].isfinite().all()


def assert_equal_up_to_rounding(found, expected):
    error = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=error, atol=error, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_a_running_merge_writes_into_views_and_nowhere_else(dtype, number):
    partials = [random_partial(dtype) for _ in range(number)]
    copies = [Partial(*map(torch.clone, partial)) for partial in partials]
    storage = random_partial(dtype, (2, 3, 10, 4))
    for tensor in storage:
        tensor.fill_(torch.nan)
    merge = RunningMerge(Partial(*(tensor[:, :, ::2] for tensor in storage)))
    for partial in partials:
        merge.add(partial)
    merge.finish()
    expected = merge_partials(partials or [empty_like(random_partial(dtype))])
    for tensor, right in zip(storage, expected, strict=True):
        assert_equal_up_to_rounding(tensor[:, :, ::2], right)
        assert tensor[:, :, 1::2].isnan().all()
    for partial, copy in zip(partials, copies, strict=True):
        assert all(map(torch.equal, partial, copy))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 6, 4), (2, 3, 6, 4)], ids=str)
def test_a_running_merge_of_some_rows_is_that_of_all_at_once(dtype, shape):
    whole = [random_partial(dtype, shape) for _ in range(2)]
    piece = random_partial(dtype, (*shape[:2], 3, shape[3]))
    merge = RunningMerge(Partial(*map(torch.empty_like, whole[0])))
    merge.add(whole[0])
    merge.add(piece, slice(2, 5))
    merge.add(whole[1])
    found = merge.finish()
    answer = Partial(*map(torch.empty_like, whole[0]))
    merge_rows(answer, [(whole[0], ROWS), (piece, slice(2, 5)), (whole[1], ROWS)])
    for tensor, expected in zip(answer, found, strict=True):
        assert_equal_up_to_rounding(tensor, expected)


@DTYPES
def test_number_of_threads_does_not_change_a_merge(dtype, monkeypatch, one_thread):
    partials = [random_partial(dtype, (2, 3, 50, 24)) for _ in range(4)]
    expected = merge_partials(partials)
    monkeypatch.setattr("cqs.partial.cpu_merge._THREAD_ELEMENTS", 1)
    for number in (1, 2, 3, 7):
        torch.set_num_threads(number)
        assert all(map(torch.equal, merge_partials(partials), expected))


@DTYPES
def test_weights_and_rounding_are_those_of_the_formula_in_pytorch(dtype):
    partials = [random_partial(dtype, (2, 3, 50, 72)) for _ in range(3)]
    partials[0].lse[:, :, 3], partials[0].output[:, :, 3] = -torch.inf, 0
    (total, largest), *others = partials
    total, sums = total.to(largest.dtype), (largest != -torch.inf).to(largest.dtype)
    for output, lse in others:
        larger = torch.maximum(largest, lse)
        old, new = torch.exp(largest - larger), torch.exp(lse - larger)
        total = total * old.unsqueeze(-1) + output.to(total.dtype) * new.unsqueeze(-1)
        sums, largest = sums * old + new, larger
    merged = merge_partials(partials)
    assert_equal_up_to_rounding(merged.output, (total / sums.unsqueeze(-1)).to(dtype))
    assert_equal_up_to_rounding(merged.lse, largest + sums.log())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_read_and_rounded_as_pytorch_does(dtype):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    output = bits.view(dtype).view(1, 1, 256, 256)
    lse = torch.zeros(1, 1, 256)
    other = Partial(output.roll(37, 3), lse)
    merged = merge_partials([Partial(output, lse), other]).output
    sums = output.float() + other.output.float()
    expected = (sums / 2).to(dtype)
    merged = torch.where(sums.isinf(), expected, merged)  # which the loops halve before
    torch.testing.assert_close(merged, expected, rtol=0, atol=0, equal_nan=True)


NOT_FINITE = torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)
"""Bits of infinity and of NaN: signalling, that of a CPU, that of a GPU, all ones."""


@DTYPES
def test_nan_of_any_bits_are_merged_as_by_pytorch(dtype, monkeypatch):
    partials = [random_partial(dtype, (1, 2, 300, 24)) for _ in range(3)]
    for output, lse in partials:
        for tensor, values in ((lse, torch.tensor([-torch.inf])), (lse, None), (output, None)):
            values = NOT_FINITE.view(torch.float32) if values is None else values
            chosen = torch.rand(tensor.shape) < 0.3
            drawn = values[torch.randint(len(values), (int(chosen.sum()),))]
            tensor[chosen] = drawn.to(tensor.dtype)
    merged = merge_own(partials)
    monkeypatch.setattr("cqs.partial._LEAST_ELEMENTS", 2**60)
    for tensor, expected in zip(merged, merge_own(partials), strict=True):
        assert_equal_up_to_rounding(tensor, expected)


ROWS_WITHOUT_KEYS = [
    (-torch.inf, torch.nan),
    (-torch.inf, torch.inf),
    (-torch.inf, 7.0),
    (-1e30, torch.nan),
    (torch.finfo(torch.float32).min, -torch.inf),
    (torch.inf, 0.0),
]


@DTYPES
@pytest.mark.parametrize(("lse", "output"), ROWS_WITHOUT_KEYS, ids=str)
def test_rows_without_keys_change_nothing_however_they_are_marked(dtype, lse, output):
    good, bad = (random_partial(dtype) for _ in range(2))
    zero = Partial(*(tensor.clone() for tensor in bad))
    for partial, marks in ((bad, (output, lse)), (zero, (0.0, -torch.inf))):
        partial.output[:, :, ::2], partial.lse[:, :, ::2] = marks
    for parts in ([good, bad], [bad, good], [bad, good, bad], [bad], [bad, bad]):
        expected = merge_partials([zero if part is bad else part for part in parts])
        running = RunningMerge(Partial(*map(torch.empty_like, good)))
        for part in parts:
            running.add(part)
        for found in (merge_partials(parts), running.finish()):
            for one, other in zip(found, expected, strict=True):
                assert_equal_up_to_rounding(one, other)


def alike(output, lse, dtype=torch.float32):
    """Return two partials of these shapes."""
    return [Partial(torch.randn(output), torch.randn(lse, dtype=dtype))] * 2


def other(**tensors):
    """Return two partials, the second of which has other tensors."""
    return [random_partial(), random_partial()._replace(**tensors)]


REFUSED = {
    "nothing": ([], "partials must have at least one element"),
    "lse [b, h, n, 1]": (alike((1, 4, 6, 8), (1, 4, 6, 1)), "partial 0: lse .*batch, num_heads"),
    "lse [b, n, h]": (alike((1, 4, 6, 8), (1, 6, 4)), "partial 0: lse .*batch, num_heads"),
    "output [b, h, n]": (alike((1, 4, 6), (1, 4, 6)), "partial 0: output .*batch, num_heads"),
    "output [b, n, h, d]": (alike((1, 6, 4, 8), (1, 4, 6)), "partial 0: lse .*batch, num_heads"),
    "narrow lse": (alike((1, 4, 6, 8), (1, 4, 6), torch.bfloat16), "float64, got torch.bfloat16"),
    "output shape": (other(output=torch.ones(2, 3, 4, 4)), r"partial 1: output .*\(2, 3, 4, 4\)"),
    "lse shape": (other(lse=torch.ones(2, 3, 4)), r"partial 1: lse .* got \(2, 3, 4\)"),
    "output dtype": (other(output=torch.ones(2, 3, 5, 4).double()), "1: output .* torch.float64"),
    "lse dtype": (other(lse=torch.ones(2, 3, 5).double()), "partial 1: lse .* torch.float64"),
    "device": (other(output=torch.ones(2, 3, 5, 4, device="meta")), "1: output .* on meta"),
    "nan": (other(lse=torch.full((2, 3, 5), torch.nan)), "partial 1: lse must be finite, or -inf"),
    "inf": (other(lse=torch.full((2, 3, 5), torch.inf)), "partial 1: lse must be finite, or -inf"),
    "output gradients": (other(output=torch.ones(2, 3, 5, 4).requires_grad_()), "not require grad"),
    "lse gradients": (other(lse=torch.ones(2, 3, 5).requires_grad_()), "must not require grad"),
}


@pytest.mark.parametrize(("parts", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_partials_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        merge_partials(parts)


def test_a_running_merge_refuses_wrong_partials():
    with pytest.raises(ValueError, match="answer: lse must be"):
        RunningMerge(REFUSED["lse [b, n, h]"][0][0])
    merge = RunningMerge(Partial(*map(torch.empty_like, random_partial())))
    with pytest.raises(ValueError, match="partial: lse must be finite"):
        merge.add(REFUSED["nan"][0][1])


def test_partials_that_require_gradients_are_merged_where_none_are_recorded():
    with torch.no_grad():
        merge_partials(REFUSED["output gradients"][0])


def test_rows_that_no_partial_answers_are_empty():
    partial = random_partial()
    part = Partial(*(t[:, :, 1:3] for t in partial))
    answers = [Partial(*(torch.full_like(t, torch.nan) for t in partial)) for _ in range(2)]
    merge = RunningMerge(answers[0])
    merge.add(part, slice(1, 3))
    merge.finish()
    merge_rows(answers[1], [(part, slice(1, 3))])
    for output, lse in answers:
        assert torch.equal(output[:, :, 1:3], partial.output[:, :, 1:3])
        assert (output[:, :, [0, 3, 4]] == 0).all() and (lse[:, :, [0, 3, 4]] == -torch.inf).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("number", [16, 17, 100])
def test_any_number_of_gradients_is_summed(number, device):
    parts = torch.randn(number, 1, 2, 5, 8, dtype=torch.bfloat16, device=device)
    total = parts.new_empty(parts.shape[1:])
    sum_rows(total, [(part, slice(None)) for part in parts])
    expected = torch.zeros_like(total, dtype=torch.float32)
    for part in parts:
        expected += part
    assert torch.equal(total, expected.to(total.dtype))


@DTYPES
@pytest.mark.parametrize("part_dtype", [torch.float32, None])
@pytest.mark.parametrize("number", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 4)])
def test_sums_of_gradients_are_those_of_their_accumulation_dtype(rows, number, part_dtype, dtype):
    part_dtype = lse_dtype(dtype) if part_dtype else dtype
    whole = [torch.randn(2, 3, 5, 4, dtype=part_dtype) for _ in range(number)]
    parts = [(part[:, :, rows], rows) for part in whole]
    storage = torch.full((2, 3, 10, 4), torch.nan, dtype=dtype)
    sum_rows(storage[:, :, ::2], parts)
    expected = torch.zeros(2, 3, 5, 4, dtype=lse_dtype(dtype))
    for part in whole:
        expected[:, :, rows] += part[:, :, rows]
    assert torch.equal(storage[:, :, ::2], expected.to(dtype))
    assert storage[:, :, 1::2].isnan().all()
