"""Measure what W workers hold, take and gain on this machine; write a page, tables and rows."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from tqdm import tqdm

from cqs.bench.measurement import append_rows, describe_device
from cqs.commands.integers import parse_integer, parse_integers
from cqs.commands.pattern_text import PATTERN_HELP
from cqs.plotting import check_picture
from cqs.report import distributed, local, ray
from cqs.report.local import Measure
from cqs.report.page import write_report
from cqs.report.rows import PASSES, ScalingRow, read_rows
from cqs.report.sections import describe, summarize_rows
from cqs.report.settings import Settings
from cqs.scheduler.arguments import as_integer

_KINDS = ("scaling",)
_EXECUTORS = ("local", "ray", "distributed")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_NUM_WORKERS = (1, 2, 3, 4, 7, 8, 13, 31)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs report``; what is left out depends on the machine."""
    parser.add_argument("kind", nargs="?", choices=_KINDS, default=_KINDS[0])
    parser.add_argument(
        "--workers", type=parse_integers, metavar="W,W,...",
        help=f"default: {','.join(map(str, _NUM_WORKERS))}; distributed: as torchrun started",
    )  # fmt: skip
    parser.add_argument("--executor", choices=_EXECUTORS, default="local")
    parser.add_argument(
        "--tokens", type=parse_integer, metavar="N", help="default: 8K, on a GPU 64K"
    )
    parser.add_argument("--pattern", metavar="CALL", help=PATTERN_HELP)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="measure gradients too")
    parser.add_argument("--heads", type=int, metavar="H", help="default: 8, on a GPU 16")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="default: as many")
    parser.add_argument("--head-dim", type=int, metavar="D", help="default: 64, on a GPU 128")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: float32, on a GPU bfloat16")
    parser.add_argument("--repeats", type=int, default=5, metavar="R")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--actors", type=int, metavar="P", help="ray: default one per GPU, else per core"
    )
    parser.add_argument("--address", help="ray: of a running cluster; default: a private one")
    parser.add_argument(
        "--out", default="cqs-report", metavar="DIR",
        help="directory for report.html, report.md and rows.jsonl; what was measured there before "
        "with the same options is kept; default: cqs-report",
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure what is missing, row by row, and write the report, of less if interrupted."""
    settings = _read_settings(options)
    workers = _read_workers(options)
    if settings.executor == "distributed" and not distributed.is_first():
        distributed.serve(settings)
        return
    directory = Path(options.out)
    directory.mkdir(parents=True, exist_ok=True)
    check_picture(directory / "report.svg")
    path = directory / "rows.jsonl"
    rows = read_rows(path)
    known = {row.key for row in rows}
    passes = PASSES if options.backward else PASSES[:1]
    missing = [(number, name) for number in workers for name in passes]
    missing = [key for key in missing if key not in known]
    if rows:
        _check_same(rows[0], settings, path, is_complete=not missing)
    try:
        with _open(settings, options) as measure:
            _measure_rows(measure, missing, settings.repeats, path)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if rows := read_rows(path):
            write_report(describe(rows, str(directory)), directory)
    print(summarize_rows(rows))
    print(directory / "report.html")


def _read_settings(options: argparse.Namespace) -> Settings:
    """Return the settings, with defaults for this machine.

    Raises:
        ValueError: if a number is too small.
    """
    on_gpu = torch.cuda.is_available()
    heads = (16 if on_gpu else 8) if options.heads is None else options.heads
    numbers = {
        "tokens": (65536 if on_gpu else 8192) if options.tokens is None else options.tokens,
        "heads": heads,
        "kv-heads": heads if options.kv_heads is None else options.kv_heads,
        "head-dim": (128 if on_gpu else 64) if options.head_dim is None else options.head_dim,
        "repeats": options.repeats,
    }
    for name, number in numbers.items():
        as_integer(f"--{name}", number, 1)
    return Settings(
        executor=options.executor,
        tokens=numbers["tokens"],
        num_heads=heads,
        num_kv_heads=numbers["kv-heads"],
        head_dim=numbers["head-dim"],
        dtype=options.dtype or ("bfloat16" if on_gpu else "float32"),
        is_causal=options.causal,
        pattern=options.pattern,
        repeats=options.repeats,
        seed=as_integer("--seed", options.seed, 0),
    )


def _read_workers(options: argparse.Namespace) -> list[int]:
    """Return the numbers of workers, ascending.

    Raises:
        ValueError: if one is less than 1, or if options do not go with the executor.
    """
    if options.executor != "ray" and not (options.actors is options.address is None):
        raise ValueError("--actors and --address go with --executor ray")
    if options.executor == "distributed":
        if options.workers is not None:
            raise ValueError("--workers does not go with --executor distributed: a rank is one")
        return [distributed.num_ranks()]
    workers = _NUM_WORKERS if options.workers is None else options.workers
    return sorted({as_integer("--workers", number, 1) for number in workers})


def _check_same(row: ScalingRow, settings: Settings, path: Path, *, is_complete: bool) -> None:
    """Raise ValueError unless rows with these settings may join those of a file."""
    differences = row.settings.differences(settings)
    if not is_complete and row.device != describe_device():
        differences.append(f"machine {row.device}, not {describe_device()}")
    if differences:
        raise ValueError(f"{path} has rows of {'; '.join(differences)}: take another --out")


def _open(settings: Settings, options: argparse.Namespace) -> AbstractContextManager[Measure]:
    match settings.executor:
        case "ray":
            return ray.opened(settings, options.actors, options.address)
        case "distributed":
            return distributed.opened(settings)
        case _:
            return local.opened(settings)


def _measure_rows(
    measure: Measure, missing: Sequence[tuple[int, str]], repeats: int, path: Path
) -> None:
    """Measure and append row by row; the bar counts the check and the repeats of each."""
    with tqdm(total=len(missing) * (1 + repeats), disable=not missing) as bar:
        for num_workers, name in missing:
            bar.set_description(f"W = {num_workers}, {name}")
            append_rows([measure(num_workers, name, bar.update)], str(path))
