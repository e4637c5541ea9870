"""Measure memory and time of one of W tasks, as in the published case study; write a report."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import case_measurement, case_sections
from cqs.commands import report
from cqs.commands.integers import parse_integers
from cqs.report.measurement import append_rows
from cqs.report.progress import progress_bar
from cqs.report.settings import Settings

_TOKENS_ON_CPU = (2500, 5000, 10_000)
_KIND = report.Kind(
    case_measurement.read_rows, case_sections.describe, case_sections.summarize_rows
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``python -m benchmarks case-study``."""
    parser.add_argument(
        "--tasks", type=parse_integers, default=case_measurement.NUM_TASKS, metavar="W,W,...",
        help=f"default: {','.join(map(str, case_measurement.NUM_TASKS))}",
    )  # fmt: skip
    parser.add_argument(
        "--seqlen", type=parse_integers, metavar="N,N,...",
        help="default: 2500,5000,10000, on a GPU as published, to 49000",
    )  # fmt: skip
    report.add_problem(parser, 8, 64, "float16" if torch.cuda.is_available() else "float32")
    report.add_out(parser, "cqs-report-memory")


def run(options: argparse.Namespace) -> None:
    """Measure the missing rows and write the report, of fewer rows if interrupted."""
    tokens = case_measurement.TOKENS if torch.cuda.is_available() else _TOKENS_ON_CPU
    settings = {
        number: report.read_settings(options, number)
        for number in sorted(set(options.seqlen or tokens))
    }
    every_num_tasks = report.check_num_tasks(options.tasks)
    any_settings = next(iter(settings.values()))
    report.write_missing(
        _KIND,
        Path(options.out),
        [(number, num_tasks) for number in settings for num_tasks in every_num_tasks],
        settings_of=lambda row: replace(any_settings, tokens=row.tokens),
        measure=partial(_measure, settings),
    )


def _measure(
    settings: Mapping[int, Settings], missing: Sequence[tuple[int, int]], path: Path
) -> None:
    """Measure and append the rows, all numbers of tasks of a sequence length together.

    Args:
        settings: Settings by number of tokens.
        missing: Numbers of tokens and of tasks.
        path: File of the rows.
    """
    tasks_of: dict[int, list[int]] = {}
    for tokens, number in missing:
        tasks_of.setdefault(tokens, []).append(number)
    total = len(missing) + sum(settings[tokens].repeats for tokens in tasks_of)
    with progress_bar(total) as bar:
        for tokens, every_num_tasks in tasks_of.items():
            bar.set_description(f"N = {tokens}")
            found = case_measurement.measure(settings[tokens], every_num_tasks, bar.update)
            append_rows([*found], str(path))
