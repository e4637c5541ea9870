"""Speed of sparse patterns compared with dense attention and, on a GPU, with other libraries."""

import argparse
import math
import statistics
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cqs
from benchmarks.cases import visible_mask
from benchmarks.errors import verify_output
from benchmarks.options import add_common
from benchmarks.plots.speedups import plot_speedups
from benchmarks.publish import make_row, publish
from benchmarks.timing import time_calls, time_in_turn
from cqs.partial import Gradients, Partial
from cqs.patterns import (
    Pattern,
    bigbird,
    block_diagonal,
    block_sparse,
    dilated,
    documents,
    fixed,
    longformer,
    sliding_window,
    strided,
)
from cqs.plotting import check_picture
from cqs.plotting.figures import save_figure
from cqs.problem import Problem, check_problem
from cqs.report.exact import verify_gradients
from cqs.report.measurement import Measurement, append_rows
from cqs.report.timing import make_timer
from cqs.worker import BACKENDS

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128
_BLOCK_SPARSE_TOKENS = 16_384
"""Most tokens for which the scores of all live blocks are kept in memory."""
_SLACK = {"naive": 2.0, "block-sparse": 2.0}
"""Factor on the tolerance of computations that round the scores to the dtype of the tensors."""
_NAIVE_TOKENS = 8192
"""Most tokens for which the whole score matrix is also computed, with a mask."""
_MASKED_TOKENS = 1024
"""Most tokens for which ``scaled_dot_product_attention`` with a mask is also timed, without
gradients."""
_SHORT_REPEATS = 41
"""Repeats of calls of so few tokens, which vary the most."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]


class PatternForms(NamedTuple):
    """One pattern in the form that each library takes."""

    name: str
    pattern: Pattern
    mask: MaskFunction
    for_flash: Mapping[str, Any] | None = None
    """Arguments of ``flash_attn_func``, or with ``ends`` of ``flash_attn_varlen_func``."""
    layout: Tensor | None = None
    """Live blocks, if every block is live or masked as a whole."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)
    parser.add_argument("--only", metavar="NAME,NAME", help="patterns whose names contain one")
    parser.add_argument("--picture", metavar="FILE", help="draw the speed-ups")


def run(
    *,
    tokens: int | None = None,
    repeats: int | None = None,
    only: str | None = None,
    out: str | None = None,
    picture: str | None = None,
) -> None:
    """Verify and time patterns: forward and backward on a GPU, forward on a CPU.

    FLOPs are ``4 d`` per live pair and head, 2.5 times that backward. On a GPU times are device
    times; "call ms" is the host time of a call.

    Args:
        tokens: Sequence length; ``None`` means 1K to 64K, each twice the last.
        repeats: Number of repeats; ``None`` means 9 on a GPU, and on a CPU 41 up to 1024 tokens, 1
            above 8192 and 3 between.
        only: Measure the patterns whose names contain one of these, separated by commas; ``None``
            means all.
        out: File to append rows to, or ``None``.
        picture: File to draw the speed-ups into, or ``None``.

    Raises:
        ValueError: No pattern has such a name, or the picture has an unknown format.
    """
    if picture is not None:
        check_picture(picture)
    parts = only.split(",") if only else [""]
    names = [case.name for case in make_forms(1024) if any(part in case.name for part in parts)]
    if not names:
        raise ValueError(f"only must name patterns, got {only!r}")
    rows: list[Measurement] = []
    columns: dict[str, Callable[[Measurement], object]] = {
        "pattern": lambda row: row.case,
        "pass": lambda row: row.benchmark.partition(" ")[2],
        "density": lambda row: f"{100 * row.details['density']:.3g} %",
        "by": lambda row: row.executor,
        "median ms": lambda row: f"{row.median_ms:.3f}",
        "useful TFLOP/s": lambda row: f"{row.details['useful_tflops']:.3g}",
        "speed-up over dense": lambda row: f"{1 / row.ratio:.3g}",
        "times density": lambda row: f"{row.details['density'] / row.ratio:.3g}",
    }
    if torch.cuda.is_available():
        columns["call ms"] = lambda row: f"{row.details['call_ms']:.2f}"
    for length in [tokens] if tokens else [1024 << i for i in range(7)]:
        for found in _measure_length(length, repeats, names):
            append_rows(found, out)
            rows += found
    publish(rows, columns, None)
    _summarize(rows)
    if picture is not None:
        save_figure(plot_speedups(list(map(asdict, rows))).figure, picture, dpi=120)


def make_forms(tokens: int) -> list[PatternForms]:
    """Return the patterns of the benchmark for a sequence length."""
    found: list[PatternForms] = []
    for share in (10, 25, 50):
        side = round(tokens * (1 - math.sqrt(1 - share / 100)))
        found += [
            _window_case(f"window-{share}", side, side),
            _window_case(f"causal-window-{share}", tokens * share // 100, 0),
        ]
    for step in (2, 4, 8, 16):
        found.append(
            PatternForms(f"every-{step}", dilated(tokens, tokens, step), _every_mask(step))
        )
    for stride in (128, 512):
        found += [
            PatternForms(f"strided-{stride}", strided(stride), _strided_mask(stride)),
            PatternForms(f"fixed-{stride}", fixed(stride, 8), _fixed_mask(stride, 8)),
        ]
    found += [
        PatternForms(
            "block-diagonal-512",
            block_diagonal(512),
            lambda b, h, q, k: q // 512 == k // 512,
            {"ends": [*range(0, tokens + 1, 512)]},
        ),
        PatternForms("longformer-512-64", longformer(512, 64), _longformer_mask(256, 64)),
    ]
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(1, tokens, (31,), generator=generator).sort().values.tolist()
    number = torch.bucketize(torch.arange(tokens), torch.tensor(ends), right=True)
    ends = [0, *ends, tokens]
    found.append(
        PatternForms(
            "documents-32",
            documents(ends),
            _documents_mask(_there(number)),
            {"ends": ends, "causal": True},
        )
    )
    if (blocks := tokens // _BLOCK) >= 8:
        birds = bigbird(block=_BLOCK, window_blocks=3, global_blocks=2, random_blocks=3, seed=0)
        in_blocks = bigbird(block=1, window_blocks=3, global_blocks=2, random_blocks=3, seed=0)
        layout = torch.from_numpy(in_blocks.to_mask(blocks))
        mask = _layout_mask(_there(layout))
        found.append(PatternForms("bigbird-128", birds, mask, layout=layout))
        for share in (10, 25, 50):
            layout = torch.rand(blocks, blocks, generator=generator) < share / 100
            layout.fill_diagonal_(True)
            pattern = block_sparse(layout, _BLOCK)
            mask = _layout_mask(_there(layout))
            found.append(PatternForms(f"random-blocks-{share}", pattern, mask, layout=layout))
    return found


def _window_case(name: str, left: int, right: int) -> PatternForms:
    mask = _window_mask(left, right)
    return PatternForms(name, sliding_window(left, right), mask, {"window_size": (left, right)})


def _window_mask(left: int, right: int) -> MaskFunction:
    return lambda b, h, q, k: (q - k <= left) & (k - q <= right)


def _every_mask(step: int) -> MaskFunction:
    return lambda b, h, q, k: (q - k) % step == 0


def _strided_mask(stride: int) -> MaskFunction:
    return lambda b, h, q, k: (q >= k) & ((q - k < stride) | ((q - k) % stride == 0))


def _fixed_mask(stride: int, columns: int) -> MaskFunction:
    return lambda b, h, q, k: (
        (q >= k) & ((q // stride == k // stride) | (k % stride >= stride - columns))
    )


def _longformer_mask(side: int, number: int) -> MaskFunction:
    return lambda b, h, q, k: ((q - k <= side) & (k - q <= side)) | (q < number) | (k < number)


def _there(tensor: Tensor) -> Tensor:
    return tensor.to("cuda") if torch.cuda.is_available() else tensor


def _documents_mask(number: Tensor) -> MaskFunction:
    return lambda b, h, q, k: (q >= k) & (number[q] == number[k])


def _layout_mask(layout: Tensor) -> MaskFunction:
    return lambda b, h, q, k: layout[q // _BLOCK, k // _BLOCK]


def _measure_length(
    tokens: int, repeats: int | None, names: list[str]
) -> Iterator[list[Measurement]]:
    """Measure patterns of these names, one after another.

    On a CPU the slow computations that do not depend on the pattern are timed once.
    """
    tensors = draw_tensors(tokens)
    on_gpu, (_, heads, _, head_dim) = tensors[0].is_cuda, tensors[0].shape
    if not repeats:
        of_cpu = 3 if tokens <= _NAIVE_TOKENS else 1
        repeats = 9 if on_gpu else _SHORT_REPEATS if tokens <= _MASKED_TOKENS else of_cpu
    known: dict[str, list[float]] = {}
    for case in make_forms(tokens):
        if case.name not in names:
            continue
        pairs = case.pattern.bind(tokens).num_pairs
        rows = []
        problem = check_problem(*tensors, pattern=case.pattern)
        for what, computations in _contenders(problem, case, known).items():
            calls = time_calls(computations, repeats) if on_gpu else {}
            label = f"{case.name} {what}"
            if not on_gpu:  # apart: they leave caches and memory in another state
                slow = {
                    name: computations.pop(name) for name in _slow(tokens) if name in computations
                }
                known |= time_in_turn(slow, repeats, make_timer(), label)
            seconds = time_in_turn(computations, repeats, make_timer(), label) | known
            for by, own in seconds.items():
                flops = {"forward": 4.0, "backward": 10.0}[what] * pairs * head_dim * heads
                details = {
                    "tokens": tokens,
                    "density": pairs / tokens**2,
                    "useful_tflops": flops / statistics.median(own) / 1e12,
                }
                if on_gpu:
                    details["call_ms"] = 1e3 * calls[by]
                rows.append(
                    make_row(
                        own,
                        tensors[0].dtype,
                        benchmark=f"patterns {what}",
                        case=f"{case.name}-{tokens}",
                        baseline="dense",
                        executor=by,
                        ratio=seconds["dense"],
                        details=details,
                    )
                )
        yield rows


def _summarize(rows: list[Measurement]) -> None:
    """Print the speed-up of cqs over every library: geometric mean and least over patterns."""
    times = {(row.benchmark, row.case, row.executor): row.median_ms for row in rows}
    for what, other in sorted({(row.benchmark, row.executor) for row in rows}):
        ratios = {
            case: time / times[what, case, "cqs"]
            for (benchmark, case, by), time in times.items()
            if (benchmark, by) == (what, other) and by not in ("cqs", "dense")
        }
        if ratios:
            least = min(ratios, key=ratios.__getitem__)
            print(
                f"{what}, times {other}: geometric mean "
                f"{statistics.geometric_mean(ratios.values()):.3g}, least {ratios[least]:.3g} "
                f"({least})"
            )


def draw_tensors(tokens: int) -> tuple[Tensor, ...]:
    """Draw query, key and value; on a GPU they require gradients."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    shape = (1, 16, tokens, 128) if on_gpu else (1, 8, tokens, 64)
    generator = torch.Generator(device).manual_seed(0)
    tensors = (
        torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(3)
    )
    return tuple(tensor.requires_grad_(on_gpu) for tensor in tensors)


def _slow(tokens: int) -> tuple[str, ...]:
    """Return the computations that take seconds on a CPU for this length."""
    return ("naive",) if tokens <= _NAIVE_TOKENS else ("dense",)


def _contenders(
    problem: Problem, case: PatternForms, known: Container[str] = ()
) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return the verified computations of each pass, except those that are known."""
    forward: dict[str, Callable[[], Tensor]] = {"cqs": lambda: _attend(problem)}
    if problem.query.requires_grad:
        forward["flex"] = _flex(problem, case.mask)
        if case.layout is not None and problem.query.shape[2] <= _BLOCK_SPARSE_TOKENS:
            forward["block-sparse"] = _block_sparse(problem, case.layout)
        if case.for_flash and not BACKENDS["flash"].why_not(
            problem.query, problem.key, problem.value
        ):
            forward["flash"] = _flash(problem, **case.for_flash)
    if "naive" not in known and problem.query.shape[2] <= _NAIVE_TOKENS:
        visible = visible_mask(problem)
        forward["naive"] = lambda: _naive(problem, visible)
    if not problem.query.requires_grad and problem.query.shape[2] <= _MASKED_TOKENS:
        forward["masked"] = _masked(problem)
    for name, attend in forward.items():
        verify_output(problem, attend(), name=name, slack=_SLACK.get(name, 1.0))
    if "dense" not in known:
        forward["dense"] = lambda: _dense(problem.query, problem.key, problem.value)
    if not problem.query.requires_grad:
        return {"forward": forward}
    with_backward = {name: attend for name, attend in forward.items() if name not in _SLACK}
    return {"forward": forward, "backward": _backward(problem, with_backward)}


def _backward(
    problem: Problem, forward: dict[str, Callable[[], Tensor]]
) -> dict[str, Callable[[], Any]]:
    """Return the verified backward passes, each from the output of its own forward pass."""
    tensors = problem.query, problem.key, problem.value
    grad_output = torch.randn_like(problem.query)
    passes: dict[str, Callable[[], Any]] = {
        name: partial(torch.autograd.grad, compute(), tensors, grad_output, retain_graph=True)
        for name, compute in forward.items()
    }
    with torch.no_grad():
        found = cqs.attention(*tensors, pattern=problem.pattern, return_lse=True)
    answer = Partial(*found)
    for name in passes.keys() - {"dense"}:
        gradients = Gradients(*passes[name]())
        verify_gradients(problem, answer, grad_output, gradients, name=name)
    return passes


def _attend(problem: Problem) -> Tensor:
    output = cqs.attention(problem.query, problem.key, problem.value, pattern=problem.pattern)
    assert isinstance(output, Tensor)
    return output


def _dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    best = SDPBackend.CUDNN_ATTENTION if query.is_cuda else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(best):
        output: Tensor = F.scaled_dot_product_attention(query, key, value)
    return output


def _naive(problem: Problem, visible: Tensor | None) -> Tensor:
    """Compute attention by its definition: the whole score matrix, masked."""
    assert visible is not None
    scores = problem.scale * problem.query @ problem.key.mT
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.nan_to_num(0.0).to(problem.value.dtype) @ problem.value


def _masked(problem: Problem) -> Callable[[], Tensor]:
    mask = visible_mask(problem)

    def attend() -> Tensor:
        output: Tensor = F.scaled_dot_product_attention(
            problem.query, problem.key, problem.value, attn_mask=mask
        )
        return output

    return attend


def _flex(problem: Problem, mask: MaskFunction) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    block_mask = _make_block_mask(mask, problem.query.shape[2], problem.query.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend() -> Tensor:
        output: Tensor = compiled(problem.query, problem.key, problem.value, block_mask=block_mask)
        return output

    return attend


def _flash(problem: Problem, ends: list[int] | None = None, **options: Any) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    tensors = [tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value)]
    if ends is None:
        return lambda: flash_attn_func(*tensors, **options)[0].transpose(1, 2)
    lengths = torch.tensor(ends, dtype=torch.int32, device=problem.query.device)
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), lengths)
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), int(lengths.diff().max()))
    packed = [tensor[0] for tensor in tensors]
    return lambda: flash_attn_varlen_func(*packed, **options)[0][None].transpose(1, 2)


def _block_sparse(problem: Problem, layout: Tensor) -> Callable[[], Tensor]:
    from benchmarks.block_sparse import make

    tensors = [each.detach() for each in (problem.query, problem.key, problem.value)]
    return make(tensors, layout, _BLOCK)


def _make_block_mask(mask: MaskFunction, tokens: int, device: torch.device) -> "BlockMask":
    """Return the result of ``create_block_mask``, row by row of blocks, without compilation."""
    from torch.nn.attention.flex_attention import BlockMask

    keys = torch.arange(tokens, device=device)
    counts = torch.stack(
        [
            mask(0, 0, queries[:, None], keys).sum(0).unflatten(0, (-1, _BLOCK)).sum(1)
            for queries in keys.split(_BLOCK)
        ]
    )

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        return chosen.sum(1).int()[None, None], order.int()[None, None]

    is_full = counts == _BLOCK * _BLOCK
    partial_blocks, full_blocks = listed((counts > 0) & ~is_full), listed(is_full)
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *full_blocks,
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(tokens, tokens),
    )
