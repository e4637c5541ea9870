"""Measure memory, time and speed-up of W tasks on this machine; write a report and rows."""

import argparse
from contextlib import ExitStack
from dataclasses import fields
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

import cqs
from cqs.arguments import as_integer
from cqs.commands.options import (
    add_causal,
    add_heads,
    note_idle,
    note_start,
    parse_integer,
    parse_integers,
)
from cqs.patterns.text import PATTERN_HELP
from cqs.plotting import check_picture
from cqs.report.drivers import LocalDriver, RayDriver
from cqs.report.findings import find
from cqs.report.measurement import append_rows, check_rows
from cqs.report.page import FILE, ROWS, check_directory, write_report
from cqs.report.rows import PASSES, ScalingRow
from cqs.report.sections import summarize_rows
from cqs.report.settings import Settings
from cqs.report.table import show
from cqs.scheduler.plan import MAX_LISTED
from cqs.worker import BACKENDS

_NUM_TASKS = (1, 2, 3, 4, 7, 8, 13, 31)
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs report``; some defaults depend on the machine."""
    on_gpu = torch.cuda.is_available()
    on_gpus, on_cpus = (2**16, 16, 128, "bfloat16"), (2**13, 8, 64, "float32")
    tokens, num_heads, head_dim, dtype = on_gpus if on_gpu else on_cpus
    token_help, heads_help, head_dim_help, dtype_help = (
        f"default: {on_cpu}, on GPUs {on_gpu}"
        for on_cpu, on_gpu in zip(on_cpus, on_gpus, strict=True)
    )
    add = parser.add_argument
    add(
        "--tasks", type=parse_integers, default=_NUM_TASKS, metavar="W,W,...",
        help=f"default: {','.join(map(str, _NUM_TASKS))}",
    )  # fmt: skip
    add("--executor", choices=("local", "ray"), default="local")
    add("--seqlen", dest="tokens", type=parse_integer, default=tokens, metavar="N", help=token_help)
    add("--pattern", metavar="CALL", help=PATTERN_HELP)
    add_causal(parser, default=False)
    add_heads(parser, num_heads, head_dim, heads_help, head_dim_help)
    add("--dtype", choices=_DTYPES, default=dtype, help=dtype_help)
    add(
        "--backend", choices=BACKENDS,
        help="kernels; 'reference' keeps all scores of a step in memory; default: as cqs.attention",
    )  # fmt: skip
    add("--repeats", type=int, default=5, metavar="R", help="default: 5")
    add("--seed", type=int, default=0)
    add("--backward", action="store_true", help="also measure the backward pass")
    add("--workers", type=int, metavar="P", help="ray: default one per GPU, else per core")
    add("--address", help="address of a running Ray cluster (default: start one)")
    add(
        "--out", metavar="DIR", default="cqs-report",
        help=f"directory for {FILE} and {ROWS}, to which rows are appended; "
        "default: cqs-report",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure all rows and write the report, of fewer rows if the command is interrupted.

    Raises:
        ValueError: An option is invalid, or the directory has other files of these names.
    """
    settings = _read_settings(options)
    tasks = sorted({as_integer("--tasks", number, 1, MAX_LISTED) for number in options.tasks})
    note_idle(tasks[-1], settings.tokens)
    directory = Path(options.out)
    directory.mkdir(parents=True, exist_ok=True)
    check_picture(directory / "report.png")
    check_directory(directory)
    path = directory / ROWS
    check_rows(str(path))
    keys = list(product(PASSES[: 1 + options.backward], tasks))
    rows: list[ScalingRow] = []
    try:
        with ExitStack() as stack:
            if settings.executor == "local":
                driver = LocalDriver(settings)
            else:
                note_start(options.address)
                cluster = cqs.Cluster(options.workers, address=options.address)
                driver = RayDriver(settings, stack.enter_context(cluster))
            number = len(keys) * (1 + settings.repeats)
            bar = stack.enter_context(tqdm(total=number, delay=2.0, disable=None, leave=False))
            for name, num_tasks in keys:
                bar.set_description(f"W = {num_tasks}, {name}")
                rows.append(driver.measure(num_tasks, name, bar.update))
                append_rows(rows[-1:], str(path))
    finally:
        if rows:
            write_report(rows, directory)
    print(*find(rows), sep="\n")
    show(summarize_rows(rows))
    print(directory / FILE)


def _read_settings(options: argparse.Namespace) -> Settings:
    """Return the settings of the options.

    Raises:
        ValueError: A number is too small, or an option does not go with the executor.
    """
    if options.num_kv_heads is None:
        options.num_kv_heads = options.num_heads
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    as_integer("--seqlen", settings.tokens, 1)
    as_integer("--heads", settings.num_heads, 1)
    as_integer("--kv-heads", settings.num_kv_heads, 1)
    as_integer("--head-dim", settings.head_dim, 1)
    as_integer("--repeats", settings.repeats, 1)
    as_integer("--seed", settings.seed, 0)
    if settings.executor != "ray" and not (options.workers is options.address is None):
        raise ValueError(
            f"--executor must be ray with --workers or --address, got {settings.executor}"
        )
    return settings
