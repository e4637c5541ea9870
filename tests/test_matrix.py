"""Executor x case x dtype x option: every pair of values on every executor, against float64.

The calls of an executor are a covering array of its axes in option_table.py: each value of an axis
meets each value of every other axis in one call at least. The oracle is the definition of attention
in float64; the error in other dtypes is compared with that of the definition in plain PyTorch.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import option_table as table
import pytest
import torch
import torch.distributed as dist
from programs import as_dtensor, within
from score_cases import Drawn, expected, factors_of, gradient_of_output
from support.bitwise import digest
from support.exact import assert_tracks_exact
from support.options import grouped
from torch.distributed.tensor import DTensor

import cqs
from benchmarks.cases import Case
from cqs.patterns import causal, from_mask

LIMITS = "max_bytes", "memory_budget"
"""Axes whose values are multiples of the least possible value."""
ARGUMENTS = {name for call in table.FUNCTIONS.values() for name in table.parameters(call)}
ARGUMENTS -= {"attn_mask", "joint", *LIMITS}  # the axis of joint tokens has names of positions
"""Axes whose values are arguments of a call."""
NUM_RANDOM = 50
"""Random calls of an executor, besides those of the covering array."""


def covering_calls(executor):
    """Return calls in which each value of an axis meets all possible values of all other axes."""
    axes, generator = table.AXES[executor], random.Random(0)
    items = [[(name, value) for value in values] for name, values in axes.items()]
    pairs = (pair for sides in combinations(items, 2) for pair in product(*sides))
    missing = dict.fromkeys(pair for pair in pairs if {*pair} not in table.IMPOSSIBLE)
    calls = []
    while missing:
        call = dict(next(iter(missing)))
        for name in generator.sample(list(axes), len(axes)):
            if name not in call:
                call[name] = _best_value(call, name, axes[name], missing, generator)
        for pair in combinations([(name, call[name]) for name in axes], 2):
            missing.pop(pair, None)
        calls.append(call)
    return calls


def _best_value(call, name, values, missing, generator):
    """Return the value of an axis that meets most values of a call for the first time."""

    def number_of_pairs(value):
        item = name, value
        return sum((item, other) in missing or (other, item) in missing for other in call.items())

    possible = [
        value
        for value in values
        if not any(pair <= {*call.items(), (name, value)} for pair in table.IMPOSSIBLE)
    ]
    return max(generator.sample(possible, len(possible)), key=number_of_pairs)


def random_call(executor, number):
    """Return a call with random values of all axes and random lengths."""
    generator = random.Random(number)
    while True:
        call = {name: generator.choice(values) for name, values in table.AXES[executor].items()}
        if not any(pair <= {*call.items()} for pair in table.IMPOSSIBLE):
            most = max(map(max, table.AXES[executor]["lengths"]))
            return call | {"lengths": (generator.randint(5, most), generator.randint(5, most))}


def every_pair(executor):
    """Parametrize a test with the covering array, and with random calls that are ``long``."""
    calls = [pytest.param(call, id=f"{n}") for n, call in enumerate(covering_calls(executor))]
    calls += [
        pytest.param(random_call(executor, n), id=f"random-{n}", marks=pytest.mark.long)
        for n in range(NUM_RANDOM)
    ]
    return pytest.mark.parametrize("call", calls)


def overlapping(tensor):
    """Return a view of a tensor's shape whose rows share memory."""
    *_, length, size = tensor.shape
    return tensor.flatten(2)[..., : length + size - 1].unfold(2, size, 1)


def draw(call, generator):
    """Return the problem of a call and the options of its scores."""
    num_heads, num_kv_heads = call["heads"]
    scored = *call["lengths"], call["batch"], num_heads
    pattern = table.MASKS[call["mask"]](*scored)
    sizes = *call["lengths"], num_heads, num_kv_heads, 16, call["batch"]
    case = Case("matrix", *sizes, call["is_causal"], pattern, call["scale"])
    problem = case.make(call["dtype"])
    if call["has_overlapping_rows"]:
        tensors = {name: overlapping(getattr(problem, name)) for name in ("query", "key", "value")}
        problem = replace(problem, **tensors)
    drawn = Drawn(problem, generator, [name for name in table.TERMS if call[name]])
    drawn.bias = table.BIASES[call["bias"]](*scored)
    drawn.has_bias_gradient = call["backend"] != "triton"
    drawn.has_slopes_gradient = drawn.has_bias_gradient and generator.random() < 0.5
    return problem, drawn


def results(call, problem, drawn):
    """Return output, LSE and gradients in float64, and those of plain PyTorch in the dtype."""
    factors = 1.0
    if call["dropout_p"]:
        factors = factors_of(problem, dropout_p=call["dropout_p"], seed=call["seed"])
    if call.get("attn_mask"):
        pattern = problem.pattern or causal() if call["is_causal"] else problem.pattern
        mask = from_mask(table.pairs_mask(*call["lengths"]))
        problem = replace(problem, pattern=pattern & mask if pattern else mask)
    tensors = {name: getattr(problem, name).double() for name in ("query", "key", "value")}
    exact = expected(replace(problem, **tensors), drawn, factors, torch.float64)
    is_exact = problem.query.dtype == torch.float64
    return exact, exact if is_exact else expected(problem, drawn, factors)


def compute(call, attend, tensors, leaves, grad_output, **options):
    """Return output, LSE (or None), and gradients if the call has them."""
    has_gradients = call.get("gradients", False)
    given = {name: call[name] for name in ARGUMENTS if name in call} | options
    with torch.set_grad_enabled(has_gradients), torch.device(call.get("default_device", "cpu")):
        for name in LIMITS:
            if multiple := call.get(name):
                given[name] = multiple * table.least(partial(attend, *tensors, **given), name)
        found = attend(*tensors, **given)
        output, lse = found if call["return_lse"] else (found, None)
        if not has_gradients:
            return [output, lse]
        leaves = *tensors, *leaves
        gradients = torch.autograd.grad(output, leaves, grad_output, materialize_grads=True)
    return [output, lse, *gradients]


def assert_exact(call, found, plain, exact):
    """Compare output, LSE and gradients with float64."""
    dtype = call["dtype"]
    assert found[0].dtype == dtype
    if call["return_lse"]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-5}.get(dtype, 2**-10)
        assert found[1].dtype == wide
        torch.testing.assert_close(found[1].double(), exact[1], rtol=tolerance, atol=tolerance)
    values = [(found[0], plain[0], exact[0])]
    if call.get("gradients"):
        values += zip(found[2:], plain[2:], exact[2:], strict=True)
    for got, eager, right in values:
        if dtype == torch.float64 or not right.numel():
            torch.testing.assert_close(got.double(), right, rtol=1e-9, atol=1e-9)
        elif (got.double() - right).abs().max() > torch.finfo(dtype).eps:
            assert_tracks_exact(got, eager, right, slack=8)


@pytest.fixture
def check(record_bits):
    """Check a call on the whole sequence."""
    return lambda call, attend: record_bits(*compared(call, attend))


def compared(call, attend):
    """Return the results of a call on the whole sequence, compared with float64."""
    problem, drawn = draw(call, random.Random(str(call)))
    exact, plain = results(call, problem, drawn)
    scores, leaves = drawn.make()
    tensors = [
        tensor.detach().requires_grad_(call.get("gradients", False))
        for tensor in (problem.query, problem.key, problem.value)
    ]
    options = {"scores": scores, "pattern": problem.pattern}
    if call.get("attn_mask"):
        options["attn_mask"] = table.pairs_mask(*call["lengths"])
    grad_output = gradient_of_output(exact[0]).to(call["dtype"])
    found = compute(call, attend, tensors, leaves, grad_output, **options)
    assert_exact(call, found, plain, exact)
    return found


@pytest.fixture
def merges(call, monkeypatch):
    if call["compiles_merges"]:
        monkeypatch.setattr("cqs.partial._LEAST_ELEMENTS", 1)


@pytest.mark.usefixtures("merges")
@every_pair("this process")
def test_every_pair_in_this_process(check, call):
    check(call, cqs.attention)


@pytest.mark.sample(2)
@pytest.mark.slow
@every_pair("Triton")
def test_every_pair_in_triton(check, call):
    check(call, cqs.attention)


@pytest.mark.usefixtures("merges")
@every_pair("streaming")
def test_every_pair_in_streaming(check, call):
    check(call, cqs.streaming.attention)


def by_ray(cluster, executor):
    """Return the function of an executor of Ray."""

    def attend(*tensors, **options):
        if executor == "Ray tasks, `submit`":
            return cluster.submit(*tensors, **options).result()
        if executor == "Ray shards":
            return cluster.attention(cluster.shard(*tensors), **grouped(options)).to_local()
        return cluster.attention(*tensors, **options)

    return attend


@pytest.mark.ray
@pytest.mark.slow
@every_pair("Ray tasks")
def test_every_pair_on_ray_tasks(cluster, check, call):
    check(call, by_ray(cluster, "Ray tasks"))


@pytest.mark.sample(4)
@pytest.mark.ray
@pytest.mark.slow
@every_pair("Ray tasks, `submit`")
def test_every_pair_on_ray_tasks_in_the_background(cluster, check, call):
    check(call, by_ray(cluster, "Ray tasks, `submit`"))


@pytest.mark.ray
@pytest.mark.slow
@every_pair("Ray shards")
def test_every_pair_on_ray_shards(cluster, check, call):
    check(call, by_ray(cluster, "Ray shards"))


def split_rows(length, marks, rank, number, position):
    """Return the joint rows of a whole sequence and the rows of a rank's shard."""
    if position == "front":
        joint, own = (0, number), [max(number, mark) for mark in marks[rank : rank + 2]]
    else:
        joint = length - number, length
        own = [min(length - number, mark) for mark in marks[rank : rank + 2]]
    return slice(*joint), slice(*own)


def check_rank(group, call):
    """Return a hash of the results of this rank, compared with its rows of the whole sequence."""
    generator, rank, num_ranks = random.Random(str(call)), dist.get_rank(group), group.size()
    problem, drawn = draw(call, generator)
    exact, plain = results(call, problem, drawn)
    numbers = (0, 0) if call["joint"] == "none" else generator.choice([(3, 5), (0, 2), (4, 0)])
    position = "rear" if call["joint"] == "rear" else "front"
    parts = []
    for length, number in zip(call["lengths"], numbers, strict=True):
        marks = [0, *sorted(generator.randint(0, length) for _ in range(num_ranks - 1)), length]
        parts.append(split_rows(length, marks, rank, number, position))
    (joint_rows, own_rows), (joint_keys, own_keys) = parts
    sides = (joint_rows, own_rows) if position == "front" else (own_rows, joint_rows)
    rows = [row for side in sides for row in range(side.start, side.stop)]

    scores, leaves = drawn.make()
    if scores.bias is not None and scores.bias.ndim > 1 and scores.bias.shape[-2] > 1:
        scores = replace(scores, bias=scores.bias[..., rows, :])
    parts = own_rows, own_keys, own_keys, joint_rows, joint_keys, joint_keys
    whole = 2 * [problem.query, problem.key, problem.value]
    tensors = [
        tensor[:, :, part].detach().requires_grad_(call["gradients"])
        for tensor, part in zip(whole, parts, strict=True)
    ]

    def attend(*tensors, **options):
        shards, joint = tensors[:3], tensors[3:]
        names = "joint_query", "joint_key", "joint_value"
        of_call = {name: t for name, t in zip(names, joint, strict=True) if t.shape[2]}
        of_call |= {"scores": scores}
        options |= of_call | {"joint_position": position, "group": group}
        if call["kind"] == "prepared":
            of_call |= {"seed": options.pop("seed"), "joint_position": position}
            return cqs.distributed.prepare(*shards, **grouped(options))(*shards, **grouped(of_call))
        if call["kind"] == "DTensor":
            shards = [as_dtensor(shard, group) for shard in shards]
        found = cqs.distributed.attention(*shards, **grouped(options))
        if not call["return_lse"]:
            return found.to_local() if isinstance(found, DTensor) else found
        return [each.to_local() if isinstance(each, DTensor) else each for each in found]

    grad_output = gradient_of_output(exact[0])[:, :, rows].to(call["dtype"])
    if rank:  # the gradients of all ranks' copies of the joint rows add up
        is_joint = [joint_rows.start <= row < joint_rows.stop for row in rows]
        grad_output[:, :, is_joint] = 0
    pattern = {"pattern": problem.pattern}
    output, lse, *found = compute(call, attend, tensors, leaves, grad_output, **pattern)
    found = [each.contiguous() for each in found]
    for each in found[3:]:
        dist.all_reduce(each, group=group)

    places = [rows, rows, *parts]
    exact, plain = ([*each[:5], *each[2:5], *each[5:]] for each in (exact, plain))
    found = [output, lse, *found]  # without gradients, its first two elements
    answers = [within(*each) for each in zip(exact, places, found, strict=False)]
    assert_exact(call, [*answers, *found[len(places) :]], plain, exact)
    return digest(*found)


@pytest.mark.slow
@every_pair("ranks")
def test_every_pair_on_ranks(ranks, record_bits, call):
    record_bits(*ranks.run(4, check_rank, call))


def raises_for_every_hole(executor, attend):
    """Check that the options raise which an executor does not support."""
    for row, axis in table.ROWS.items():
        if (row, executor) in table.HOLES:
            query = torch.randn(1, 2, 8, 4, requires_grad=row == "gradients")
            value = next(axes[axis][-1] for axes in table.AXES.values() if axis in axes)
            options = {} if row == "gradients" else {row: value}
            with pytest.raises((TypeError, ValueError, NotImplementedError)):
                attend(query, query, query, **options)


def test_holes_raise_without_ray(ranks):
    raises_for_every_hole("this process", cqs.attention)
    raises_for_every_hole("streaming", cqs.streaming.attention)
    ranks.run(1, holes_raise_on_rank)


def holes_raise_on_rank(group):
    raises_for_every_hole(
        "ranks",
        lambda *tensors, **options: cqs.distributed.attention(
            *tensors, **grouped(options), group=group
        ),
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("executor", [name for name in table.FUNCTIONS if name.startswith("Ray")])
def test_holes_raise_on_ray(cluster, executor):
    raises_for_every_hole(executor, by_ray(cluster, executor))


def test_a_cell_says_yes_if_the_executor_has_the_axis():
    has_axis = [cell for cell in table.cells() if table.ROWS[cell[0]] in table.AXES[cell[1]]]
    assert [cell for cell in table.cells() if cell not in table.HOLES] == has_axis


def test_the_table_has_every_argument():
    names = {name for each in table.FUNCTIONS.values() for name in table.parameters(each)}
    rows = {row.partition(",")[0] for row in table.ROWS}
    tensors = "self", "query", "key", "value"
    assert names - rows == {*table.OWN, *tensors} and rows - names == {"gradients"}


def test_the_table_is_up_to_date():
    text = table.PAGE.read_text().partition(f"{table.BEGIN}\n")[2].partition(f"\n{table.END}")[0]
    assert text == table.format_table()
