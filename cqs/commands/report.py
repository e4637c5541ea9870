"""Measure memory, time and speed-up of W tasks on this machine; write a report and rows."""

import argparse
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cqs.commands.integers import parse_integers
from cqs.commands.pattern_text import PATTERN_HELP
from cqs.output_files import lock_directory
from cqs.plotting import check_picture
from cqs.report import case_sections, case_study, distributed, local, ray, sections
from cqs.report.content import Content
from cqs.report.local import Measure
from cqs.report.measurement import append_rows, describe_device
from cqs.report.page import check_directory, write_report
from cqs.report.progress import progress_bar
from cqs.report.rows import PASSES, ReportRow, read_rows
from cqs.report.settings import Settings
from cqs.scheduler.arguments import as_integer
from cqs.scheduler.plan import MAX_LISTED

_EXECUTORS = ("local", "ray", "distributed")
_DTYPES = ("float64", "float32", "bfloat16", "float16")


class _Defaults(NamedTuple):
    """Default sizes of a report."""

    tokens: tuple[int, ...]
    num_heads: int
    head_dim: int
    dtype: str


class _Kind(NamedTuple):
    """A kind of report."""

    out: str
    """Default directory."""
    num_tasks: tuple[int, ...]
    """Default numbers of tasks."""
    on_cpu: _Defaults
    """Default sizes without a GPU."""
    on_gpu: _Defaults
    """Default sizes with a GPU."""
    keys: Callable[[argparse.Namespace, Sequence[Settings], Sequence[int]], list[Any]]
    """Returns the keys of all rows that options, settings and numbers of tasks request."""
    measure: Callable[[argparse.Namespace, Sequence[Settings], Sequence[Any], Path], None]
    """Measures the rows with given keys, and appends each to a file at once."""
    read: Callable[[Path], list[Any]]
    describe: Callable[[Any, str], Content]
    summarize: Callable[[Any], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs report``; some defaults depend on the machine."""
    parser.add_argument(
        "kind", nargs="?", choices=_KINDS, default="scaling",
        help="scaling: memory, time and speed-up of W tasks; memory: memory of one of W tasks over "
        "time, and the published case study; default: scaling",
    )  # fmt: skip
    parser.add_argument(
        "--tasks", type=parse_integers, metavar="W,W,...",
        help=f"default: {_listed('scaling')}; memory: {_listed('memory')}; distributed: as "
        "torchrun started",
    )  # fmt: skip
    parser.add_argument("--executor", choices=_EXECUTORS, default="local")
    parser.add_argument(
        "--seqlen", type=parse_integers, metavar="N",
        help="default: 8K, on a GPU 64K; memory: N,N,..., default: 2500,5000,10000, on a GPU as "
        "published, to 49000",
    )  # fmt: skip
    parser.add_argument("--pattern", metavar="CALL", help=PATTERN_HELP)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="also measure the backward pass")
    parser.add_argument("--heads", type=int, metavar="H", help="default: 8, scaling on a GPU 16")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="default: as many as heads")
    parser.add_argument(
        "--head-dim", type=int, metavar="D", help="default: 64, scaling on a GPU 128"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES,
        help="default: float32, on a GPU bfloat16; memory: on a GPU float16",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, metavar="R")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--actors", type=int, metavar="P", help="ray: default one per GPU, else per core"
    )
    parser.add_argument("--address", help="ray: of a running cluster; default: a private one")
    parser.add_argument(
        "--out", metavar="DIR",
        help="directory for report.html, report.md and rows.jsonl; earlier rows with the same "
        f"options are kept; default: {_KINDS['scaling'].out}; memory: "
        f"{_KINDS['memory'].out}",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure the missing rows and write the report, of fewer rows if interrupted."""
    kind = _KINDS[options.kind]
    settings = _read_settings(options)
    every_num_tasks = _read_num_tasks(options)
    if options.executor == "distributed" and not distributed.is_first():
        distributed.serve(settings[0])
        return
    directory = Path(options.out or kind.out)
    directory.mkdir(parents=True, exist_ok=True)
    check_picture(directory / "report.svg")
    check_directory(directory)
    with lock_directory("--out", directory):
        _measure_missing(options, settings, every_num_tasks, directory)


def _measure_missing(
    options: argparse.Namespace,
    settings: Sequence[Settings],
    every_num_tasks: Sequence[int],
    directory: Path,
) -> None:
    """Measure the rows that are missing in a directory, and write the report there."""
    kind = _KINDS[options.kind]
    path = directory / "rows.jsonl"
    rows = kind.read(path)
    known: set[Hashable] = {row.key for row in rows}
    missing = [key for key in kind.keys(options, settings, every_num_tasks) if key not in known]
    if rows:
        _check_same(options, rows[0], settings[0], path, is_complete=not missing)
    try:
        kind.measure(options, settings, missing, path)
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if rows := kind.read(path):
            write_report(kind.describe(rows, str(directory)), directory)
    print(kind.summarize(rows))
    print(directory / "report.html")


def _listed(kind: str) -> str:
    return ",".join(map(str, _KINDS[kind].num_tasks))


def _read_settings(options: argparse.Namespace) -> list[Settings]:
    """Return the settings, ascending in tokens, with defaults for this machine.

    Raises:
        ValueError: A number is too small, or a scaling report has several numbers of tokens.
    """
    kind = _KINDS[options.kind]
    default = kind.on_gpu if torch.cuda.is_available() else kind.on_cpu
    heads = default.num_heads if options.heads is None else options.heads
    numbers = {
        "heads": heads,
        "kv-heads": heads if options.kv_heads is None else options.kv_heads,
        "head-dim": default.head_dim if options.head_dim is None else options.head_dim,
        "repeats": options.repeats,
    }
    for name, number in numbers.items():
        as_integer(f"--{name}", number, 1)
    tokens = default.tokens if options.seqlen is None else options.seqlen
    if options.kind == "scaling" and len(tokens) > 1:
        raise ValueError(
            f"--seqlen must be one number except for cqs report memory, got {len(tokens)} numbers"
        )
    return [
        Settings(
            executor=options.executor,
            tokens=number,
            num_heads=heads,
            num_kv_heads=numbers["kv-heads"],
            head_dim=numbers["head-dim"],
            dtype=options.dtype or default.dtype,
            is_causal=options.causal,
            pattern=options.pattern,
            repeats=options.repeats,
            seed=as_integer("--seed", options.seed, 0),
        )
        for number in sorted({as_integer("--seqlen", number, 1) for number in tokens})
    ]


def _read_num_tasks(options: argparse.Namespace) -> list[int]:
    """Return the numbers of tasks, ascending.

    Raises:
        ValueError: A number is less than 1 or more than 4,096, or an option is not supported by the
            kind of report or the executor.
    """
    if options.kind == "memory" and (options.executor != "local" or options.backward):
        raise ValueError(
            "cqs report memory does not support --backward or --executor "
            f"{options.executor}: leave them out"
        )
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
    every_num_tasks = _KINDS[options.kind].num_tasks if options.tasks is None else options.tasks
    return sorted({as_integer("--tasks", number, 1, MAX_LISTED) for number in every_num_tasks})


def _check_same(
    options: argparse.Namespace,
    row: ReportRow,
    settings: Settings,
    path: Path,
    *,
    is_complete: bool,
) -> None:
    """Raise ValueError unless rows with these settings may join those of a file."""
    if options.kind == "memory":
        settings = replace(settings, tokens=row.tokens)
    differences = row.settings.differences(settings)
    if not is_complete and row.device != describe_device():
        differences.append(f"machine {row.device}, not {describe_device()}")
    if differences:
        raise ValueError(
            f"--out must have rows of these options, got {path} with "
            f"{'; '.join(differences)}: pass another directory"
        )


def _scaling_keys(
    options: argparse.Namespace, settings: Sequence[Settings], every_num_tasks: Sequence[int]
) -> list[tuple[int, str]]:
    passes = PASSES if options.backward else PASSES[:1]
    return [(number, name) for number in every_num_tasks for name in passes]


def _measure_scaling(
    options: argparse.Namespace,
    settings: Sequence[Settings],
    missing: Sequence[tuple[int, str]],
    path: Path,
) -> None:
    """Measure and append the rows; the bar counts the verification and repeats of each."""
    with (
        _open(settings[0], options) as measure,
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


def _memory_keys(
    options: argparse.Namespace, settings: Sequence[Settings], every_num_tasks: Sequence[int]
) -> list[tuple[int, int]]:
    return [(each.tokens, number) for each in settings for number in every_num_tasks]


def _measure_memory(
    options: argparse.Namespace,
    settings: Sequence[Settings],
    missing: Sequence[tuple[int, int]],
    path: Path,
) -> None:
    """Measure and append the rows, all numbers of tasks of a sequence length together."""
    of_tokens = {each.tokens: each for each in settings}
    tasks_of: dict[int, list[int]] = {}
    for tokens, number in missing:
        tasks_of.setdefault(tokens, []).append(number)
    total = len(missing) + len(tasks_of) * options.repeats
    with progress_bar(total) as bar:
        for tokens, every_num_tasks in tasks_of.items():
            bar.set_description(f"N = {tokens}")
            append_rows(
                [*case_study.measure(of_tokens[tokens], every_num_tasks, bar.update)], str(path)
            )


_KINDS = {
    "scaling": _Kind(
        "cqs-report",
        (1, 2, 3, 4, 7, 8, 13, 31),
        _Defaults((8192,), 8, 64, "float32"),
        _Defaults((65_536,), 16, 128, "bfloat16"),
        _scaling_keys,
        _measure_scaling,
        read_rows,
        sections.describe,
        sections.summarize_rows,
    ),
    "memory": _Kind(
        "cqs-report-memory",
        case_study.NUM_TASKS,
        _Defaults((2500, 5000, 10_000), 8, 64, "float32"),
        _Defaults(case_study.TOKENS, 8, 64, "float16"),
        _memory_keys,
        _measure_memory,
        case_study.read_rows,
        case_sections.describe,
        case_sections.summarize_rows,
    ),
}
