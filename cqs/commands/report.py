"""Measure memory, time and speed-up of W tasks on this machine; write a report and rows."""

import argparse
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cqs.arguments import as_integer
from cqs.commands.integers import parse_integer, parse_integers
from cqs.files import lock_directory
from cqs.patterns.text import PATTERN_HELP
from cqs.plotting import check_picture
from cqs.report import distributed, local, ray, sections
from cqs.report.content import Content
from cqs.report.local import Measure
from cqs.report.measurement import append_rows, describe_device
from cqs.report.page import check_directory, write_report
from cqs.report.progress import progress_bar
from cqs.report.rows import PASSES, ReportRow, read_rows
from cqs.report.settings import Settings
from cqs.scheduler.plan import MAX_LISTED

_EXECUTORS = ("local", "ray", "distributed")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_OUT = "cqs-report"
_NUM_TASKS = (1, 2, 3, 4, 7, 8, 13, 31)


class Defaults(NamedTuple):
    """Heads and dtype that a report measures if its options do not state them."""

    num_heads: int
    head_dim: int
    dtype: str


_ON_CPU = Defaults(8, 64, "float32")
_ON_GPU = Defaults(16, 128, "bfloat16")
_TOKENS_ON_CPU, _TOKENS_ON_GPU = 8192, 65_536


class Kind(NamedTuple):
    """How the rows of a report are read and shown."""

    read: Callable[[Path], list[Any]]
    """Reads the rows of a file."""
    describe: Callable[[Any, str], Content]
    """Returns the content of the report, given rows and the directory."""
    summarize: Callable[[Any], str]
    """Returns the text table of rows for the terminal."""


_SCALING = Kind(read_rows, sections.describe, sections.summarize_rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs report``; some defaults depend on the machine."""
    parser.add_argument(
        "--tasks", type=parse_integers, metavar="W,W,...",
        help=f"default: {','.join(map(str, _NUM_TASKS))}; distributed: as torchrun started",
    )  # fmt: skip
    parser.add_argument("--executor", choices=_EXECUTORS, default="local")
    parser.add_argument(
        "--seqlen", type=parse_integer, metavar="N", help="default: 8K, on a GPU 64K"
    )
    add_problem(parser, _ON_CPU, _ON_GPU)
    parser.add_argument("--backward", action="store_true", help="also measure the backward pass")
    parser.add_argument(
        "--actors", type=int, metavar="P", help="ray: default one per GPU, else per core"
    )
    parser.add_argument("--address", help="ray: of a running cluster; default: a private one")
    add_out(parser, _OUT)


def add_problem(parser: argparse.ArgumentParser, on_cpu: Defaults, on_gpu: Defaults) -> None:
    """Declare the options of the problem that a report measures, except its lengths.

    Args:
        parser: The parser of the command.
        on_cpu: Defaults without a GPU, for the help text.
        on_gpu: Defaults with a GPU, for the help text.
    """

    def default(name: str) -> str:
        small, large = getattr(on_cpu, name), getattr(on_gpu, name)
        return f"default: {small}" if small == large else f"default: {small}, on a GPU {large}"

    parser.add_argument("--pattern", metavar="CALL", help=PATTERN_HELP)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--heads", type=int, metavar="H", help=default("num_heads"))
    parser.add_argument("--kv-heads", type=int, metavar="H", help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, metavar="D", help=default("head_dim"))
    parser.add_argument("--dtype", choices=_DTYPES, help=default("dtype"))
    parser.add_argument("--repeats", type=int, default=5, metavar="R")
    parser.add_argument("--seed", type=int, default=0)


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the option of the directory of a report."""
    parser.add_argument(
        "--out", metavar="DIR", default=default,
        help="directory for report.html, report.md and rows.jsonl; earlier rows with the same "
        f"options are kept; default: {default}",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure the missing rows and write the report, of fewer rows if interrupted."""
    has_gpu = torch.cuda.is_available()
    tokens = _TOKENS_ON_GPU if has_gpu else _TOKENS_ON_CPU
    settings = read_settings(
        options,
        tokens if options.seqlen is None else options.seqlen,
        _ON_GPU if has_gpu else _ON_CPU,
        options.executor,
    )
    every_num_tasks = _read_num_tasks(options)
    if options.executor == "distributed" and not distributed.is_first():
        distributed.serve(settings)
        return
    passes = PASSES if options.backward else PASSES[:1]
    write_missing(
        _SCALING,
        Path(options.out),
        [(number, name) for number in every_num_tasks for name in passes],
        settings_of=lambda row: settings,
        measure=partial(_measure, options, settings),
    )


def write_missing(
    kind: Kind,
    directory: Path,
    keys: Sequence[Hashable],
    *,
    settings_of: Callable[[Any], Settings],
    measure: Callable[[Sequence[Any], Path], None],
) -> None:
    """Measure the rows that are missing in a directory, and write the report there.

    Args:
        kind: How the rows of this report are read and shown.
        directory: Where the report and its rows are; it is made if it is missing.
        keys: Keys of all rows that the report must have.
        settings_of: Returns the settings with which this command would measure a given row.
        measure: Measures the rows with given keys, and appends them to a file.

    Raises:
        ValueError: The directory has other files of these names, or rows that were measured
            with other settings or on another machine, or another process writes to it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    check_picture(directory / "report.svg")
    check_directory(directory)
    with lock_directory("--out", directory):
        path = directory / "rows.jsonl"
        rows = kind.read(path)
        known: set[Hashable] = {row.key for row in rows}
        missing = [key for key in keys if key not in known]
        if rows:
            _check_same(rows[0], settings_of(rows[0]), path, is_complete=not missing)
        try:
            measure(missing, path)
        except KeyboardInterrupt:
            print("interrupted: run the same command again to resume", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            if rows := kind.read(path):
                write_report(kind.describe(rows, str(directory)), directory)
        print(kind.summarize(rows))
        print(directory / "report.html")


def read_settings(
    options: argparse.Namespace, tokens: int, default: Defaults, executor: str = "local"
) -> Settings:
    """Return the settings of the options that :func:`add_problem` declares.

    Raises:
        ValueError: if a number is too small.
    """
    heads = default.num_heads if options.heads is None else options.heads
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    head_dim = default.head_dim if options.head_dim is None else options.head_dim
    return Settings(
        executor=executor,
        tokens=as_integer("--seqlen", tokens, 1),
        num_heads=as_integer("--heads", heads, 1),
        num_kv_heads=as_integer("--kv-heads", kv_heads, 1),
        head_dim=as_integer("--head-dim", head_dim, 1),
        dtype=options.dtype or default.dtype,
        is_causal=options.causal,
        pattern=options.pattern,
        repeats=as_integer("--repeats", options.repeats, 1),
        seed=as_integer("--seed", options.seed, 0),
    )


def check_num_tasks(every_num_tasks: Sequence[int]) -> list[int]:
    """Return the numbers of tasks, ascending.

    Raises:
        ValueError: if one is less than 1 or more than 4,096.
    """
    return sorted({as_integer("--tasks", number, 1, MAX_LISTED) for number in every_num_tasks})


def _read_num_tasks(options: argparse.Namespace) -> list[int]:
    """Return the numbers of tasks, ascending.

    Raises:
        ValueError: if one is less than 1 or more than 4,096, or if options do not go with the
            executor.
    """
    if options.executor != "ray" and not (options.actors is options.address is None):
        raise ValueError(
            f"--executor must be ray with --actors or --address, got {options.executor}"
        )
    if options.executor == "distributed":
        if options.tasks is not None:
            raise ValueError(
                "--tasks must be left out with --executor distributed, which has one task per rank"
            )
        return [distributed.num_ranks()]
    return check_num_tasks(_NUM_TASKS if options.tasks is None else options.tasks)


def _check_same(row: ReportRow, settings: Settings, path: Path, *, is_complete: bool) -> None:
    """Raise ValueError unless rows with these settings may join those of a file."""
    differences = row.settings.differences(settings)
    if not is_complete and row.device != describe_device():
        differences.append(f"machine {row.device}, not {describe_device()}")
    if differences:
        raise ValueError(
            f"--out must have rows of these options, got {path} with "
            f"{'; '.join(differences)}: pass another directory"
        )


def _measure(
    options: argparse.Namespace,
    settings: Settings,
    missing: Sequence[tuple[int, str]],
    path: Path,
) -> None:
    """Measure and append the rows; the bar counts the verification and repeats of each."""
    with (
        _open(settings, options) as measure,
        progress_bar(len(missing) * (1 + options.repeats)) as bar,
    ):
        for num_tasks, name in missing:
            bar.set_description(f"W = {num_tasks}, {name}")
            append_rows([measure(num_tasks, name, bar.update)], str(path))


def _open(settings: Settings, options: argparse.Namespace) -> AbstractContextManager[Measure]:
    match settings.executor:
        case "ray":
            return ray.opened(settings, options.actors, options.address)
        case "distributed":
            return distributed.opened(settings)
        case _:
            return local.opened(settings)
