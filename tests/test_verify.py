from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from support.exact import attend, exact_answer

import cqs
from benchmarks.cases import CASES
from cqs.executors import local
from cqs.executors.verify import VerificationError, sample_rows, verify_rows
from cqs.partial import Partial
from cqs.patterns import dilated, global_tokens, longformer, sliding_window
from cqs.problem import check_problem
from cqs.worker import worker as worker_module
from cqs.worker.calls import attend_call

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BY_NAME = {case.name: case for case in CASES}
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def right_answer(problem):
    exact = exact_answer(problem)
    lse_dtype = torch.promote_types(problem.query.dtype, torch.float32)
    return Partial(exact.output.to(problem.query.dtype), exact.lse.to(lse_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tasks", [1, 8])
@EVERY_CASE
def test_right_answers_pass(case, num_tasks, dtype):
    attend(case.make(dtype), num_tasks=num_tasks, verify=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY_CASE
def test_one_wrong_number_is_found_and_named(case, dtype):
    problem = case.make(dtype)
    answer = right_answer(problem)
    verify_rows(problem, answer)
    row = problem.query.shape[2] - 1  # which sees keys in every case
    spoiled = Partial(answer.output.clone(), answer.lse)
    spoiled.output[0, 1, row, 2] += 1
    message = rf"output of batch 0, head 1, row {row} deviates by (1|0\.99).*, more than .* \(.+\)"
    with pytest.raises(ArithmeticError, match=message):
        verify_rows(problem, spoiled)
    relative = 1e-3 if dtype.itemsize > 2 else 1e-2
    answer.lse[0, 2, row] += relative * (1 + answer.lse[0, 2, row].abs())
    with pytest.raises(VerificationError, match=f"lse of batch 0, head 2, row {row} deviates by"):
        verify_rows(problem, answer)


def test_the_first_row_is_always_among_the_sampled():
    problem = BY_NAME["ragged"].make()
    for part in ("output", "lse"):
        answer = right_answer(problem)
        getattr(answer, part)[1, 3, 0] += 1
        with pytest.raises(
            VerificationError, match=f"{part} of batch 1, head 3, row 0 deviates by"
        ):
            verify_rows(problem, answer, num_rows=1, seed=5)


@pytest.mark.parametrize(
    ("case", "part", "wrong"),
    [
        *product(["ragged"], ["output", "lse"], [torch.nan, torch.inf, -torch.inf]),
        *product(["more-queries-causal"], ["lse"], [torch.nan, 0.0]),  # of a row without keys
    ],
)
def test_values_that_are_no_numbers_are_found(case, part, wrong):
    problem = BY_NAME[case].make()
    answer = right_answer(problem)
    getattr(answer, part)[0, 0, 0] = wrong
    with pytest.raises(VerificationError, match=f"{part} of batch 0, head 0, row 0"):
        verify_rows(problem, answer)


def with_value(entries):
    """A problem whose value has these entries, by (key, column), in every batch and head."""
    problem = BY_NAME["ragged-causal"].make()
    for (key, column), entry in entries.items():
        problem.value[:, :, key, column] = entry
    return problem


NOT_FINITE = {
    "nan": {(3, 2): torch.nan},
    "inf": {(3, 2): torch.inf},
    "minus-inf": {(3, 2): -torch.inf},
    "both-inf": {(3, 2): torch.inf, (9, 2): -torch.inf},
    "far-apart": {(0, 0): torch.nan, (60, 1): torch.inf, (130, 15): -torch.inf},
    "a-whole-token": {(5, ...): torch.nan},
}


@pytest.mark.parametrize("entries", NOT_FINITE.values(), ids=NOT_FINITE)
def test_a_value_that_is_not_finite_counts_only_where_it_is_seen(entries):
    problem = with_value(entries)
    for num_tasks in (1, 7, 8):
        attend(problem, num_tasks=num_tasks, verify=True)
    answer = right_answer(replace(problem, value=problem.value.nan_to_num(0, 0, 0)))
    seen = exact_answer(replace(problem, value=(~problem.value.isfinite()).float())).output > 0
    with pytest.raises(VerificationError, match="output of batch 0, head 0, row"):
        verify_rows(problem, answer, num_rows=2000)
    infinite = torch.zeros_like(answer.output)
    for (key, column), entry in entries.items():
        infinite[:, :, key:, column] += entry
    answer.output[seen] = infinite[seen]
    verify_rows(problem, answer, num_rows=2000)
    answer.output[:, :, 2, 2] = torch.nan
    with pytest.raises(VerificationError, match="row 2 .*not finite, which reaches rows that"):
        verify_rows(problem, answer, num_rows=2000)


@pytest.mark.parametrize("huge", [torch.inf, torch.nan, 1e30])
def test_a_value_elsewhere_does_not_hide_an_error(huge):
    problem = with_value({(100, 2): huge})
    for row, column in ((130, 3), (50, 2)):  # another column; a row that does not see it
        answer = right_answer(with_value({}))
        answer.output[:, :, 100:, 2] = exact_answer(problem).output[:, :, 100:, 2]
        verify_rows(problem, answer, num_rows=2000)
        answer.output[1, 2, row, column] += 0.01
        message = f"output of batch 1, head 2, row {row} deviates by 0.01"
        with pytest.raises(VerificationError, match=message):
            verify_rows(problem, answer, num_rows=2000)


def test_an_infinite_value_of_no_weight_may_give_nan():
    key = torch.tensor([0.0, 1.0])[:, None].expand(1, 1, 2, 4)
    value = torch.zeros(1, 1, 2, 4)
    value[0, 0, 0, 1] = torch.inf
    for scale, may_be_nan in ((1.0, False), (30.0, True)):  # exp(-4 * scale)
        problem = check_problem(torch.ones(1, 1, 2, 4), key, value, scale=scale)
        answer = right_answer(problem)
        assert (answer.output[..., 1] == torch.inf).all()
        verify_rows(problem, answer)
        answer.output[..., 1] = torch.nan
        with nullcontext() if may_be_nan else pytest.raises(VerificationError):
            verify_rows(problem, answer)


WRONG_BACKENDS = {
    "half-the-output": lambda partial: partial._replace(output=partial.output / 2),
    "lse-in-base-two": lambda partial: partial._replace(lse=partial.lse * 1.4427),
    "lse-off": lambda partial: partial._replace(lse=partial.lse + 0.01),
    "nan": lambda partial: partial._replace(output=partial.output * torch.nan),
    "rows-reversed": lambda partial: Partial(partial.output.flip(2), partial.lse.flip(2)),
}


@pytest.mark.parametrize("num_tasks", [1, 7, 8])
@pytest.mark.parametrize("spoil", WRONG_BACKENDS.values(), ids=WRONG_BACKENDS)
def test_a_wrong_backend_is_caught(monkeypatch, spoil, num_tasks):
    for module in (worker_module, local):  # in tasks, and in the single call of a local run
        monkeypatch.setattr(module, "attend_call", lambda *given: spoil(attend_call(*given)))
    problem = BY_NAME["ragged-causal"].make()
    with pytest.raises(VerificationError, match=r"batch 0, head 0, row \d+ deviates by"):
        attend(problem, num_tasks=num_tasks, verify=True)


KINDS = {
    "normal": lambda q, k, v: (q, k, v),
    "equal columns": lambda q, k, v: (*(t[..., :1].expand_as(t) for t in (q, k)), v),
    "positive": lambda q, k, v: (q.abs(), k.abs(), v.abs()),
    "a third": lambda q, k, v: (torch.full_like(q, 1 / 3), torch.full_like(k, 0.7), v),
    "equal values": lambda q, k, v: (q, k, torch.full_like(v, 0.7)),
    "equal scores": lambda q, k, v: (0 * q, k, torch.full_like(v, 1 / 3)),
    "large scores": lambda q, k, v: (30 * q, 30 * k, v),
    "huge scores": lambda q, k, v: (1e4 * q, 1e4 * k, v),
    "tiny": lambda q, k, v: (1e-4 * q, 1e-4 * k, 1e-6 * v),
    "tiniest": lambda q, k, v: (1e-30 * q, k, 1e-38 * v),
    "cancelling": lambda q, k, v: (
        torch.cat([q, q], -1)[..., : q.shape[-1]] * 20,
        torch.cat([k[..., ::2], -k[..., ::2]], -1)[..., : k.shape[-1]] * 20,
        v - v.mean(dim=2, keepdim=True),
    ),
    "alternating": lambda q, k, v: (q, k, v + 100 * (-1) ** torch.arange(v.shape[2])[:, None]),
    "one outlier": lambda q, k, v: (
        q,
        torch.cat([k[:, :, :-1], 50 * k[:, :, -1:]], 2),
        torch.cat([v[:, :, :-1], 1e4 * v[:, :, -1:]], 2),
    ),
}
PATTERNS = (
    sliding_window(20, 3),
    sliding_window(4, 4) | global_tokens(1),
    longformer(16, [3]),
    dilated(8, 0, 3),
)


def draw(seed):
    """Return a description, the tensors and the options of a call of at most 3000 keys."""
    choose = Random(seed)
    kind = choose.choice(list(KINDS))
    dtype = choose.choice([torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16])
    head_dim = choose.choice([1, 5, 8, 16, 64, 64, 128, 512, 1024, 4096])
    seqlen_q = choose.choice([1, 2, 3, 7, 31, 53, 128])
    seqlen_kv = choose.choice([seqlen_q, seqlen_q, 1, 40, 600, 3000 if head_dim <= 128 else 100])
    num_heads = choose.choice([1, 2])
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(1, heads, length, head_dim, generator=generator)
        for heads, length in ((num_heads, seqlen_q), (1, seqlen_kv), (1, seqlen_kv))
    ]
    tensors = [each.to(dtype) for each in KINDS[kind](*tensors)]
    options = {
        "return_lse": True,
        "verify": True,
        "num_tasks": choose.choice([1, 2, 3, 7, 8, 13, 31, 53]),
        "is_causal": choose.random() < 0.4,
        "backend": choose.choice([None, None, "reference"]),
    }
    if seqlen_q == seqlen_kv > 2 and choose.random() < 0.3:
        options["pattern"] = choose.choice(PATTERNS)
    elif choose.random() < 0.15:
        options |= {"dropout_p": 0.3, "seed": seed, "backend": None}
    if dtype == torch.float64:
        options["backend"] = None
    shape = f"{seqlen_q} x {seqlen_kv}, head_dim {head_dim}, {dtype}, {options}"
    return f"seed {seed}: {kind}, {shape}", tensors, options


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_right_answers_to_structured_problems_pass(first):
    for seed in range(first, first + 20):
        described, tensors, options = draw(seed)
        try:
            cqs.attention(*tensors, **options)
        except VerificationError as error:
            pytest.fail(f"{described}: {error}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e8, -1e12, 1e30])
def test_huge_scores_are_not_accused(scale, dtype):
    """Rounding then moves whole weights from key to key, and the lse by more than 700."""
    query, key, value = torch.randn(3, 1, 2, 40, 16)
    key[:, :, 20:] = key[:, :, :20] * (1 + 1e-6)
    one_hot = torch.eye(40)[:, :16].expand(1, 2, 40, 16)
    for values in (value, one_hot):
        tensors = [each.to(dtype) for each in (query, key, values)]
        for num_tasks in (1, 7):
            options = {"scale": scale, "num_tasks": num_tasks, "return_lse": True}
            answer = cqs.attention(*tensors, verify=True, **options)
    dropout = {"dropout_p": 0.3, "seed": 3}
    cqs.attention(*tensors, verify=True, **options, **dropout)
    problem = check_problem(*tensors, scale=scale)
    answer[1][0, 1, 0] *= 1.1
    with pytest.raises(VerificationError, match="lse of batch 0, head 1, row 0"):
        verify_rows(problem, Partial(*answer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu", torch.float32), ("reference", torch.float32), ("reference", torch.float64)],
)
def test_a_million_equal_keys_are_not_accused(backend, dtype):
    query, key = torch.zeros(1, 1, 3, 8, dtype=dtype), torch.zeros(1, 1, 1_000_000, 8, dtype=dtype)
    value = torch.full_like(key, 1 / 3)
    cqs.attention(query, key, value, num_tasks=1, backend=backend, verify=True)


def bound_of(problem, answer, target, place):
    """Return the bound of an entry of an answer, which the error of an infinite one states."""
    before = target[place].item()
    target[place] = torch.inf
    with pytest.raises(VerificationError) as raised:
        verify_rows(problem, answer)
    target[place] = before
    return float(str(raised.value).partition("explains (")[2].partition(")")[0])


@pytest.mark.slow
@pytest.mark.sample(9)
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_fault_of_ten_times_the_bound_is_missed(first):
    for seed in range(first, first + 20):
        described, tensors, options = draw(seed)
        if "dropout_p" in options:
            continue  # the problem would have to be told what to drop
        options_of_problem = {name: options.get(name) for name in ("is_causal", "pattern")}
        problem = check_problem(*tensors, **options_of_problem)
        answer, choose = Partial(*cqs.attention(*tensors, **options)), Random(seed)
        for name, target in zip(answer._fields, answer, strict=True):
            row = choose.choice(sample_rows(target.shape[2]))
            head, *column = map(choose.randrange, target.shape[1:2] + target.shape[3:])
            place = 0, head, row, *column
            before = target[place].clone()
            if before.isfinite():
                target[place] += 10 * bound_of(problem, answer, target, place)
                with pytest.raises(VerificationError, match=f"{name} of .*, row {row} "):
                    verify_rows(problem, answer)
                    pytest.fail(described)
                target[place] = before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_of_the_size_of_what_rounding_does(dtype):
    """Of ordinary problems: at most 2000 units of rounding of the accumulation."""
    problem = replace(BY_NAME["full"], seqlen_kv=1000, head_dim=64).make(dtype)
    answer = Partial(*attend(problem, num_tasks=7, verify=True))
    unit = torch.finfo(dtype).eps
    accumulation = 2000 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for place in product([0], range(4), [0, 127]):
        assert bound_of(problem, answer, answer.lse, place) < accumulation + unit
        assert bound_of(problem, answer, answer.output, (*place, 9)) < accumulation + 4 * unit
