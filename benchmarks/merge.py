"""Bandwidth of the merge, relative to that of a copy."""

import argparse
import statistics

import torch

from benchmarks.errors import verify_close
from benchmarks.options import add_common
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.timing import time_in_turn
from cqs.partial import Partial, lse_dtype, merge_rows
from cqs.report.measurement import Measurement
from cqs.report.timing import Timer

_DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16
_SHAPES = (8, 64, 1024, 3), (8, 64, 8192, 4), (8, 128, 4096, 4), (16, 128, 4096, 6)
"""Number of heads, head dimension, rows and number of partial outputs."""
_COPY_BYTES = 2**27
"""Bytes of a copy on a CPU; on a GPU 16 times as many, because its cache is larger."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser)


def run(*, tokens: int | None = None, repeats: int = 30, out: str | None = None) -> None:
    """Verify and time the merge of the parts of one group.

    It runs on the GPU if there is one, else on as many threads as PyTorch uses.

    The bandwidth counts the bytes of all partial outputs and of the result once, and those of a
    copy of a tensor twice.

    Args:
        tokens: Rows of the group; ``None`` means those of each shape.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.
    """
    rows = [
        _measure(dtype, (*sizes, tokens or num_rows, num_parts), repeats)
        for dtype in _DTYPES
        for *sizes, num_rows, num_parts in _SHAPES
    ]
    publish(rows, make_columns("threads", "gigabytes_per_second", "copy_gigabytes_per_second"), out)


def _measure(dtype: torch.dtype, shape: tuple[int, ...], repeats: int) -> Measurement:
    num_heads, head_dim, num_rows, num_parts = shape
    on_gpu = torch.cuda.is_available()
    device, copy_bytes = ("cuda", 16 * _COPY_BYTES) if on_gpu else ("cpu", _COPY_BYTES)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        shape = 1, num_heads, num_rows, *sizes
        return torch.randn(shape, generator=generator, device=device)

    parts = [
        Partial(draw(head_dim).to(dtype), draw().to(lse_dtype(dtype))) for _ in range(num_parts)
    ]
    answer = Partial(*map(torch.empty_like, parts[0]))
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)

    def merge() -> None:
        merge_rows(answer, [(part, slice(None)) for part in parts])

    merge()
    _verify(answer, parts)
    seconds = time_in_turn(
        {"merge": merge, "copy": lambda: target.copy_(source)}, repeats, Timer(device), "merge"
    )
    num_bytes = sum(tensor.nbytes for part in (*parts, answer) for tensor in part)
    rates, copy_rates = (
        [size / each / 1e9 for each in seconds[name]]
        for name, size in (("merge", num_bytes), ("copy", 2 * copy_bytes))
    )
    return make_row(
        seconds["merge"],
        dtype,
        benchmark="merge",
        case=f"{num_parts}-parts-{num_rows}-h{num_heads}-d{head_dim}",
        baseline="copy, time per byte",
        executor="triton" if on_gpu else "cpu",
        ratio=statistics.median(a / b for a, b in zip(copy_rates, rates, strict=True)),
        details={
            "threads": torch.get_num_threads(),
            "gigabytes_per_second": statistics.median(rates),
            "copy_gigabytes_per_second": statistics.median(copy_rates),
        },
    )


def _verify(answer: Partial, parts: list[Partial]) -> None:
    """Compare with weighted sums in float64."""
    lses = torch.stack([part.lse for part in parts]).double()
    weights = lses.softmax(0).unsqueeze(-1)
    exact = sum(weight * part.output.double() for weight, part in zip(weights, parts, strict=True))
    verify_close("merged output", answer.output, exact)
    verify_close("merged LSE", answer.lse, lses.logsumexp(0))
