"""Attention under a memory budget, compared with the same call on tensors on the device."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import cqs
from benchmarks.errors import relative_error
from benchmarks.options import CAUSAL, add_common, add_heads, add_passes
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.streaming_files import measure_files
from benchmarks.timing import time_by_wall_clock, track
from cqs.executors.streaming.budget import parse_budget
from cqs.executors.streaming.engine import Side, stream
from cqs.executors.streaming.plan import HeldBlock, Position
from cqs.executors.streaming.sources import Source, read_rows
from cqs.problem import Problem
from cqs.report.exact import check_error
from cqs.report.measurement import Measurement
from cqs.scheduler import AttentionShape
from cqs.streaming import OnDemand, Pass, StreamPlan, make_stream_plan

_SHARE = 4
"""Bytes of the resident call divided by the default budget."""
_SAMPLE = 16
_CHUNK = 2**20
_POOL = 2**20
_SHORT = 2**15
_ERROR = 0.002
"""Tolerance of float16 outputs. A resident call is allowed more: one accumulator sums all tokens,
and tensor cores truncate each sum."""
_DISTANCE = 0.005
"""Tolerance of float16 gradients: with a million tokens, weights of 1e-6 keep four bits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    add_heads(parser, 8)
    add_passes(parser, backward="no")
    parser.add_argument("--budget", metavar="BYTES", help="such as 4GiB; default: a quarter")
    parser.add_argument("--part", action="store_true", default=None, help="one block alone")


def run(
    *,
    tokens: Sequence[int] | None = None,
    repeats: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 128,
    causal: str = "both",
    backward: str = "no",
    budget: str | None = None,
    part: bool = False,
    out: str | None = None,
) -> None:
    """Verify and time attention of pinned tensors under a budget, and of tensors on the device.

    Without a GPU it times ``cqs attend`` on files, forward, and measures its resident set.

    Args:
        tokens: Sequence lengths; ``None`` means 2^20, without a GPU 2^18.
        repeats: Number of repeats.
        heads: Number of query heads.
        kv_heads: Number of KV heads; ``None`` means as many as query heads.
        head_dim: Head dimension.
        causal: ``"yes"``, ``"no"`` or ``"both"``.
        backward: ``"yes"`` times the forward and the backward pass together.
        budget: See :func:`cqs.streaming.attention`; ``None`` means a quarter of query, key, value
            and output, and of their gradients.
        part: Run only the last block of the plan, on tokens made on demand, and extrapolate.
        out: File to append rows to, or ``None``.

    Raises:
        NotImplementedError: There is no GPU, and this is not Linux, or ``backward`` or ``part`` is
            set.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu and (part or backward == "yes"):
        raise NotImplementedError("--part and --backward require a GPU")
    shape = AttentionShape(heads, head_dim, num_kv_heads=kv_heads, itemsize=2 if on_gpu else 4)
    rows: list[Measurement] = []
    for length in tokens or [2**20 if on_gpu else 2**18]:
        for is_causal in CAUSAL[causal]:
            resident = 2 * (shape.query_bytes(length) + shape.key_bytes(length) // 2)
            if backward == "yes":
                resident *= 2
            given = resident // _SHARE if budget is None else parse_budget(budget, _device())
            if not on_gpu:
                rows.append(measure_files(length, shape, is_causal, given))
            elif part:
                rows.append(_measure_part(length, shape, is_causal, given))
            else:
                measure = _measure_both if backward == "yes" else _measure_forward
                rows.append(measure(length, shape, is_causal, given, repeats))
    publish(rows, make_columns("predicted_ms", "peak_bytes", "predicted_bytes", "budget"), out)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _measure_forward(
    length: int, shape: AttentionShape, is_causal: bool, budget: int, repeats: int
) -> Measurement:
    host = _make(length, shape)
    output = torch.empty(host[0].shape, dtype=host[0].dtype, pin_memory=True)

    def attend(tensors: list[Tensor], **options: Any) -> Tensor:
        return _attend(tensors, is_causal=is_causal, **options)

    _warm_up(attend, host)
    resident, answer = _time_resident(attend, host, repeats)
    error_of_resident = _error(answer, host, is_causal, range(length))
    del answer

    def attend_in_parts() -> None:
        attend(host, memory_budget=budget, out=output)

    streamed = []
    for _ in track(range(repeats), repeats, "streamed"):
        output.zero_()
        seconds, peak, _ = _time_and_measure(attend_in_parts)
        streamed.append(seconds)
    error = _error(output, host, is_causal, range(length))
    check_error("sampled rows", error, _ERROR)
    check_error("sampled rows of the resident call", error_of_resident, 5 * _ERROR)
    plan = make_stream_plan(length, length, shape, budget=budget, is_causal=is_causal)
    row = _row("forward", shape, plan, streamed, resident, peak, plan.peak_bytes, plan.seconds)
    row.details.update(error=error, baseline_error=error_of_resident)
    return row


def _measure_both(
    length: int, shape: AttentionShape, is_causal: bool, budget: int, repeats: int
) -> Measurement:
    host = [tensor.requires_grad_() for tensor in _make(length, shape)]
    grad_output = torch.randn(host[0].shape, dtype=torch.float16, device="cuda").cpu().pin_memory()

    def differentiate(tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
        output = _attend(tensors, is_causal=is_causal, **options)
        grad = grad_output[:, :, : output.shape[2]].to(output.device)
        return torch.autograd.grad(output, tensors, grad)

    _warm_up(differentiate, host)
    resident, found = _time_resident(differentiate, host, repeats)
    expected = [gradient.cpu() for gradient in found]
    del found

    def differentiate_in_parts() -> tuple[Tensor, ...]:
        return differentiate(host, memory_budget=budget)

    streamed = []
    for _ in track(range(repeats), repeats, "streamed"):
        seconds, peak, gradients = _time_and_measure(differentiate_in_parts)
        streamed.append(seconds)
    distance = max(map(_distance, gradients, expected))
    check_error("gradients, to the resident call", distance, _DISTANCE)
    plans = [
        make_stream_plan(length, length, shape, budget=budget, is_causal=is_causal, which=which)
        for which in Pass
    ]
    most = max(plan.peak_bytes for plan in plans)
    predicted = sum(plan.seconds for plan in plans)
    row = _row("both", shape, plans[0], streamed, resident, peak, most, predicted)
    row.details["distance"] = distance
    return row


def _measure_part(length: int, shape: AttentionShape, is_causal: bool, budget: int) -> Measurement:
    pools = [tensor[0] for tensor in _make(_POOL, shape)]

    def source(pool: Tensor) -> OnDemand:
        def make(batch: int, head: int, rows: range) -> Tensor:
            index = torch.arange(rows.start, rows.stop) % _POOL
            return pool[head][index]

        return OnDemand(make, (1, pool.shape[0], length, pool.shape[2]), pool.dtype)

    sources = list(map(source, pools))
    plan = make_stream_plan(length, length, shape, budget=budget, is_causal=is_causal)
    *_, last = plan.blocks(Position(plan.num_groups - 1, 0))
    start = Position(plan.num_groups - 1, last.tokens.start)
    output = torch.empty((1, shape.num_heads, length, shape.value_columns), dtype=torch.float16)
    query, key, value = cast(list[Any], sources)
    problem = Problem(query, key, value, is_causal, shape.head_dim**-0.5)
    targets = [output, torch.empty(output.shape[:3])]

    def compute() -> None:
        stream(plan, _device(), problem, None, targets, start=start)

    seconds, peak, _ = _time_and_measure(compute)
    error = _error(output, sources, is_causal, last.tokens, last)
    check_error("sampled rows", error, _ERROR)
    share = plan.count(last.tokens, range(length)) / plan.live_pairs / plan.num_groups
    row = _row(
        "forward, one block",
        shape,
        plan,
        [seconds],
        [share * plan.seconds],
        peak,
        plan.peak_bytes,
        share * plan.seconds,
    )
    row.details.update(error=error, share=share, extrapolated_ms=1e3 * seconds / share)
    return row


def _attend(tensors: list[Tensor], **options: Any) -> Tensor:
    query, key, value = tensors
    attention = cqs.streaming.attention if "memory_budget" in options else cqs.attention
    output = attention(query, key, value, **options)
    assert isinstance(output, Tensor)
    return output


def _make(length: int, shape: AttentionShape) -> list[Tensor]:
    """Draw query, key and value in pinned memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for heads in (shape.num_heads, shape.kv_heads, shape.kv_heads):
        tensor = torch.empty(
            (1, heads, length, shape.head_dim), dtype=torch.float16, pin_memory=True
        )
        for head in range(heads):
            tensor[0, head].copy_(
                torch.randn(tensor.shape[2:], generator=generator, device="cuda").half()
            )
        made.append(tensor)
    return made


def _time_resident(
    compute: Callable[[list[Tensor]], Any], host: list[Tensor], repeats: int
) -> tuple[list[float], Any]:
    """Time a computation of tensors on the GPU."""
    on_gpu = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in host]
    results = [
        time_by_wall_clock(lambda: compute(on_gpu))
        for _ in track(range(repeats), repeats, "resident")
    ]
    return [seconds for seconds, _ in results], results[-1][1]


def _time_and_measure(compute: Callable[[], Any]) -> tuple[float, int, Any]:
    """Return seconds, peak bytes that are allocated meanwhile, and the result."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds, found = time_by_wall_clock(compute)
    return seconds, torch.cuda.max_memory_allocated() - before, found


def _warm_up(compute: Callable[..., Any], host: list[Tensor]) -> None:
    """Run a short computation, which compiles all kernels and raises the GPU clock."""
    short = [tensor.detach()[:, :, :_SHORT] for tensor in host]
    for tensors, options in (
        ([tensor.cuda() for tensor in short], {}),
        (short, {"memory_budget": short[0].numel()}),
    ):
        compute([tensor.requires_grad_(host[0].requires_grad) for tensor in tensors], **options)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest relative error of a head."""
    return max(
        relative_error(here.cuda(), there.cuda())
        for here, there in zip(ours[0], theirs[0], strict=True)
    )


def _error(
    output: Tensor,
    sources: Side,
    is_causal: bool,
    rows: range,
    block: HeldBlock | None = None,
) -> float:
    """Return the relative error of sampled rows to float64, the worse of first and last head."""
    heads = range(output.shape[1]) if block is None else block.heads
    group_size = sources[0].shape[1] // sources[1].shape[1]
    sample = [rows[i * (len(rows) - 1) // (_SAMPLE - 1)] for i in range(_SAMPLE)]
    worst = 0.0
    for head in {heads[0], heads[-1]}:
        query = torch.cat([_read(sources[0], head, range(row, row + 1)) for row in sample])
        exact = _exact(query, sources[1:], head // group_size, sample, is_causal)
        found = output[0, head, sample].cuda().double()
        worst = max(worst, relative_error(found, exact))
    return worst


def _exact(query: Tensor, keys: Side, head: int, rows: Sequence[int], is_causal: bool) -> Tensor:
    """Compute rows of attention in float64, one chunk of keys at a time."""
    length = keys[0].shape[2]
    places = torch.tensor(rows, device="cuda")
    largest = torch.full((len(rows), 1), -torch.inf, dtype=torch.float64, device="cuda")
    sums, total = torch.zeros_like(largest), torch.zeros_like(query)
    for first in range(0, length, _CHUNK):
        tokens = range(first, min(first + _CHUNK, length))
        key, value = (_read(source, head, tokens) for source in keys)
        scores = query @ key.T * query.shape[1] ** -0.5
        if is_causal:
            masked_out = torch.arange(tokens.start, tokens.stop, device="cuda") > places.unsqueeze(
                1
            )
            scores.masked_fill_(masked_out, -torch.inf)
        new = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        weights, old = (scores - new).exp(), (largest - new).exp()
        sums, total = sums * old + weights.sum(dim=1, keepdim=True), total * old + weights @ value
        largest = new
    return total / sums


def _read(source: Tensor | Source, head: int, rows: range) -> Tensor:
    into = torch.empty((1, len(rows), source.shape[3]), dtype=source.dtype)
    read_rows(source, 0, range(head, head + 1), rows, into)
    return into[0].cuda().double()


def _row(
    name: str,
    shape: AttentionShape,
    plan: StreamPlan,
    seconds: list[float],
    baseline: list[float],
    peak: int,
    predicted: int,
    predicted_seconds: float,
) -> Measurement:
    return make_row(
        seconds,
        "float16",
        benchmark=f"streaming {name}",
        case=f"{'causal' if plan.is_causal else 'full'}-{plan.seqlen_q}-h{shape.num_heads}"
        f":{shape.kv_heads}-d{shape.head_dim}",
        baseline="predicted" if "block" in name else "resident",
        executor="cqs",
        ratio=baseline,
        details={
            "tokens": plan.seqlen_q,
            "baseline_ms": 1e3 * statistics.median(baseline),
            "predicted_ms": 1e3 * predicted_seconds,
            "peak_bytes": peak,
            "predicted_bytes": predicted,
            "budget": plan.budget,
        },
    )
