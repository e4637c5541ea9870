"""Steps of a model on one device, and on ranks that share its tokens: training and denoising."""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bottleneck import SHAPES
from benchmarks.errors import relative_error
from benchmarks.options import add_common
from benchmarks.peers import peak_bytes, time_together, verify_together
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.ranks import join_ranks
from cqs.arguments import as_integer
from cqs.report.exact import TOLERANCES, check_error
from cqs.report.measurement import Measurement, append_rows

_ALONE = "sdpa", "cqs one"
"""Names of the methods of the first rank alone."""
_SLACK = 5
"""Factor on the tolerance of attention, for results after all layers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    names = [name for shapes in SHAPES.values() for name in shapes if name != "bert-base"]
    parser.add_argument("--model", choices=names, help="default: llama-8b; on CPUs llama-tiny")
    parser.add_argument("--only", metavar="NAME,NAME", help="these methods alone, and sdpa")


def run(
    *,
    tokens: Sequence[int] | None = None,
    model: str | None = None,
    only: str | None = None,
    repeats: int = 5,
    out: str | None = None,
) -> None:
    """Verify and time steps with random weights, on the ranks that torchrun started.

    ``sdpa`` and ``cqs one`` run on the first rank alone, the other methods on all, each with its
    part of the tokens. A time is that of the slowest rank. Weights are bfloat16 on GPUs and
    float32 on CPUs.

    A step of a Llama is a training step: a forward pass, its loss, a backward pass, the sum of
    gradients over ranks, their norm and AdamW with a learning rate of 0, so that all steps compute
    the same. The vocabulary has 32,000 words (``llama-tiny``: 100). ``torch`` is PyTorch's context
    parallelism, a prototype for GPUs.

    A step of the other models, which are of diffusers, is a forward pass without gradients.
    ``wan-30-heads`` and ``wan-15-heads`` have the layers of Wan with such numbers of heads of 128.
    ``ulysses`` and ``ring`` are the context parallelism of diffusers, on GPUs, if the number of
    ranks divides the tokens, and for ``ulysses`` the heads. ``ulysses anything`` and ``ring
    anything`` are its modes for other numbers. It does not support CogVideoX.

    Args:
        tokens: Sequence lengths, at least 2 for each rank; ``None`` means 16K and 32K, or 512 on
            CPUs.
        model: Name of a shape; ``None`` means ``"llama-8b"``, or ``"llama-tiny"`` on CPUs.
        only: Names of methods besides ``sdpa``, separated by commas; ``None`` means all.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.

    Raises:
        ValueError: A method is unknown or does not run here, or there are too few tokens.
        VerificationError: A result is not that of ``sdpa``: the output, or the loss or a gradient
            of the first layer's queries, keys and values; on every rank.
    """
    for length in tokens or []:
        as_integer("tokens", length, 2 * int(os.environ.get("WORLD_SIZE", 1)))
    device = join_ranks()
    on_gpu = device.type == "cuda"
    rows: list[Measurement] = []
    for length in tokens or ([2**14, 2**15] if on_gpu else [512]):
        shape = model or ("llama-8b" if on_gpu else "llama-tiny")
        found = _measure(shape, length, only, device, repeats)
        append_rows(found, out)
        rows += found
    if rows:
        publish(rows, make_columns("tokens_per_second", "peak_bytes"), None)
    dist.destroy_process_group()


def _measure(
    shape: str, length: int, only: str | None, device: torch.device, repeats: int
) -> list[Measurement]:
    """Verify and time the steps of one model; return the rows on the first rank."""
    subject: Any
    if shape in SHAPES["diffusers"]:
        from benchmarks.denoising import Denoising

        subject = Denoising(shape, length, device)
    else:
        from benchmarks.training import Training

        subject = Training(shape, length, device)
    names = [*_ALONE, *subject.methods]
    chosen = only.split(",") if only else names
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"only must name some of {', '.join(names)}; got {unknown[0]!r}")
    group, is_first = dist.group.WORLD, dist.get_rank() == 0
    expected = subject.step("sdpa")
    steps: dict[str, Callable[[], list[Tensor]]] = {
        name: partial(subject.step, name) if is_first or name not in _ALONE else lambda: expected
        for name in names
        if name in ("sdpa", *chosen)
    }
    for name, step in steps.items():
        for what, own, whole in zip(subject.results, step(), expected, strict=True):
            error, most = relative_error(own, whole), _SLACK * TOLERANCES[subject.dtype]
            verify_together(partial(check_error, f"{name}: {what}", error, most), group)
    peaks = {name: peak_bytes(step, group) for name, step in steps.items()}
    seconds = time_together(steps, repeats, group, device)
    rows = [
        make_row(
            own,
            subject.dtype,
            benchmark="model step",
            case=f"{shape}-{length}",
            baseline="sdpa",
            num_tasks=1 if name in _ALONE else dist.get_world_size(),
            executor=name,
            ratio=seconds["sdpa"],
            details={
                "tokens": length,
                "tokens_per_second": length / statistics.median(own),
                "peak_bytes": peaks[name],
            },
        )
        for name, own in seconds.items()
    ]
    return rows if is_first else []
