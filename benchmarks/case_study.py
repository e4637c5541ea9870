"""Memory and time of one of W tasks, as in the published case study."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.case_measurement import NUM_TASKS, TOKENS, CaseRow, measure
from benchmarks.options import add_common, add_heads
from benchmarks.plots.case_study import plot_study
from benchmarks.publish import make_columns, publish
from benchmarks.timing import progress_bar
from cqs.commands.options import parse_integers
from cqs.plotting import check_picture
from cqs.plotting.figures import save_figure
from cqs.report.settings import Settings

_TOKENS_ON_CPU = (2500, 5000, 10_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    add_heads(parser, 8, 64)
    parser.add_argument(
        "--tasks", type=parse_integers, metavar="W,W,...", help="default: as published"
    )
    parser.add_argument("--causal", action="store_true", default=None)
    parser.add_argument(
        "--snapshots", metavar="DIR", help="write files for https://pytorch.org/memory_viz; GPUs"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="plot memory over time, longest subsequences and times"
    )


def run(
    *,
    tokens: Sequence[int] | None = None,
    tasks: Sequence[int] = NUM_TASKS,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    causal: bool = False,
    repeats: int = 5,
    out: str | None = None,
    snapshots: str | None = None,
    picture: str | None = None,
) -> None:
    """Verify all tasks of every plan, then measure the task with the longest subsequence alone.

    Args:
        tokens: Sequence lengths; ``None`` means as published on a GPU, up to 10,000 on a CPU.
        tasks: Numbers of tasks.
        heads: Number of query heads.
        kv_heads: Number of KV heads; ``None`` means as many.
        head_dim: Size of a head.
        causal: Whether attention is causal.
        repeats: Number of repeats, of which medians are shown.
        out: File to append rows to, or ``None``.
        snapshots: Folder for the allocator's histories, or ``None``.
        picture: File of a picture, or ``None``.

    Raises:
        NotImplementedError: Snapshots are asked for, and there is no GPU.
    """
    if picture is not None:
        check_picture(picture)
    on_gpu = torch.cuda.is_available()
    folder = None if snapshots is None else Path(snapshots)
    if folder is not None and not on_gpu:
        raise NotImplementedError("--snapshots requires a GPU: they are histories of its allocator")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    lengths = sorted(set(tokens or (TOKENS if on_gpu else _TOKENS_ON_CPU)))
    every_num_tasks = sorted(set(tasks))
    rows: list[CaseRow] = []
    with progress_bar(len(lengths) * (len(every_num_tasks) + repeats)) as bar:
        for length in lengths:
            bar.set_description(f"N = {length}")
            settings = Settings(
                "local",
                length,
                heads,
                heads if kv_heads is None else kv_heads,
                head_dim,
                "float16" if on_gpu else "float32",
                is_causal=causal,
                repeats=repeats,
            )
            rows += measure(settings, every_num_tasks, bar.update, folder)
    publish(rows, make_columns("held_tokens", "peak_bytes", "predicted_bytes"), out)
    print(f"memory: {', '.join(sorted({row.memory for row in rows}))}")
    if picture is not None:
        save_figure(plot_study(rows), picture, dpi=100)
