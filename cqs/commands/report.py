"""Measure memory, time and speed-up of W tasks on this machine; write a report and rows."""

import argparse
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cqs.arguments import as_integer
from cqs.commands.integers import parse_integer, parse_integers
from cqs.files import lock_directory
from cqs.patterns.text import PATTERN_HELP
from cqs.plotting import check_picture
from cqs.report import sections
from cqs.report.content import Content
from cqs.report.drivers import open_driver
from cqs.report.measurement import append_rows, describe_device
from cqs.report.page import check_directory, write_report
from cqs.report.progress import progress_bar
from cqs.report.rows import PASSES, ReportRow, read_rows
from cqs.report.settings import OPTIONS, Settings
from cqs.scheduler.plan import MAX_LISTED

_NUM_TASKS = (1, 2, 3, 4, 7, 8, 13, 31)


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
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--tasks", type=parse_integers, metavar="W,W,...",
        help=f"default: {','.join(map(str, _NUM_TASKS))}; distributed: as torchrun started",
    )  # fmt: skip
    parser.add_argument("--executor", choices=("local", "ray", "distributed"), default="local")
    parser.add_argument(
        "--seqlen", type=parse_integer, default=2**16 if on_gpu else 2**13, metavar="N",
        help="default: 8K, on a GPU 64K",
    )  # fmt: skip
    add_problem(parser, *((16, 128, "bfloat16") if on_gpu else (8, 64, "float32")))
    parser.add_argument("--backward", action="store_true", help="also measure the backward pass")
    parser.add_argument(
        "--actors", type=int, metavar="P", help="ray: default one per GPU, else per core"
    )
    parser.add_argument("--address", help="ray: of a running cluster; default: a private one")
    add_out(parser, "cqs-report")


def add_problem(parser: argparse.ArgumentParser, num_heads: int, head_dim: int, dtype: str) -> None:
    """Declare the options of the problem that a report measures, except its lengths.

    Args:
        parser: The parser of the command.
        num_heads: Default number of query heads on this machine.
        head_dim: Default size of a head on this machine.
        dtype: Default dtype on this machine.
    """

    def add(option: str, default: Any = None, **declared: Any) -> None:
        parser.add_argument(option, dest=OPTIONS[option], default=default, **declared)

    dtypes = "float64", "float32", "bfloat16", "float16"
    add("--pattern", metavar="CALL", help=PATTERN_HELP)
    add("--causal", False, action="store_true")
    add("--heads", num_heads, type=int, metavar="H", help=f"default here: {num_heads}")
    add("--kv-heads", type=int, metavar="H", help="default: as many as heads")
    add("--head-dim", head_dim, type=int, metavar="D", help=f"default here: {head_dim}")
    add("--dtype", dtype, choices=dtypes, help=f"default here: {dtype}")
    add("--repeats", 5, type=int, metavar="R", help="default: 5")
    add("--seed", 0, type=int)


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the option of the directory of a report."""
    parser.add_argument(
        "--out", metavar="DIR", default=default,
        help="directory for report.html, report.md and rows.jsonl; earlier rows with the same "
        f"options are kept; default: {default}",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure the missing rows and write the report, of fewer rows if interrupted."""
    settings = read_settings(options, options.seqlen, options.executor)
    every_num_tasks = _read_num_tasks(options)
    measure = partial(_measure, options, settings)
    if options.executor == "distributed" and os.environ["RANK"] != "0":
        measure([], None)
        return
    write_missing(
        _SCALING,
        Path(options.out),
        [(number, name) for number in every_num_tasks for name in PASSES[: 1 + options.backward]],
        settings_of=lambda row: settings,
        measure=measure,
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


def read_settings(options: argparse.Namespace, tokens: int, executor: str = "local") -> Settings:
    """Return the settings of the options that :func:`add_problem` declares.

    Raises:
        ValueError: A number is too small.
    """
    values = {name: getattr(options, name) for name in OPTIONS.values()}
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    for option in ("--heads", "--kv-heads", "--head-dim", "--repeats"):
        as_integer(option, values[OPTIONS[option]], 1)
    as_integer("--seed", options.seed, 0)
    return Settings(executor, as_integer("--seqlen", tokens, 1), **values)


def check_num_tasks(every_num_tasks: Sequence[int]) -> list[int]:
    """Return the numbers of tasks, ascending.

    Raises:
        ValueError: if one is less than 1 or more than 4,096.
    """
    return sorted({as_integer("--tasks", number, 1, MAX_LISTED) for number in every_num_tasks})


def _read_num_tasks(options: argparse.Namespace) -> list[int]:
    """Return the numbers of tasks, ascending.

    Raises:
        ValueError: A number is less than 1 or more than 4,096, an option does not go with the
            executor, or torchrun did not start this process.
    """
    if options.executor != "ray" and not (options.actors is options.address is None):
        raise ValueError(
            f"--executor must be ray with --actors or --address, got {options.executor}"
        )
    if options.executor != "distributed":
        return check_num_tasks(_NUM_TASKS if options.tasks is None else options.tasks)
    if options.tasks is not None:
        raise ValueError(
            "--tasks must be left out with --executor distributed, which has one task per rank"
        )
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "executor 'distributed' must be started by torchrun, one process per GPU: "
            "torchrun --nproc-per-node 4 -m cqs report --executor distributed"
        )
    return [int(os.environ["WORLD_SIZE"])]


def _check_same(row: ReportRow, settings: Settings, path: Path, *, is_complete: bool) -> None:
    """Raise ValueError unless rows with these settings may join those of a file."""
    differences = row.differences(settings)
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
    path: Path | None,
) -> None:
    """Measure the rows; the bar counts the verification and repeats of each.

    Args:
        options: The parsed options.
        settings: The problem and the options of its measurement.
        missing: Numbers of tasks and passes.
        path: File to append the rows to; ``None`` on all ranks but the first, which measure what
            the first rank requests.
    """
    if not missing and settings.executor != "distributed":
        return
    total = len(missing) * (1 + options.repeats)
    with (
        open_driver(settings, options.actors, options.address) as driver,
        progress_bar(total, is_shown=path is not None) as bar,
    ):
        for num_tasks, name in driver.agree(missing):
            bar.set_description(f"W = {num_tasks}, {name}")
            row = driver.measure(num_tasks, name, bar.update)
            if path is not None:
                append_rows([row], str(path))
