"""Run suites and print their table: ``python -m tests.judged [SUITE ...]``."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from cqs.report.measurement import _commit

from . import SUITES
from .framework import Verdict, format_table, judge


def main() -> int:
    """Return 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"among {', '.join(SUITES)}")
    parser.add_argument(
        "--out", type=Path, help="file of one JSON object per suite; rows of other suites remain"
    )
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"SUITE must be among {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # the problems are small
    verdicts = []
    for name in options.suites or SUITES:
        suite = import_module(f"{__package__}.{name}").suite()
        verdicts.append(judge(suite, _print_failure))
        if options.out is not None:
            _replace_row(options.out, verdicts[-1])
    print(format_table(verdicts))
    return int(any(each.failed for each in verdicts))


def _print_failure(case: str, error: str) -> None:
    print(f"FAILED {case}: {error}", flush=True)


def _replace_row(path: Path, verdict: Verdict) -> None:
    """Write a suite's row at once, because all suites together take long."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if row["suite"] != verdict.suite]
    rows.append(verdict.as_row() | {"torch_version": torch.__version__, "commit": _commit()})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
