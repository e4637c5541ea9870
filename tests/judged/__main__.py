"""Run suites and print their table: ``python -m tests.judged [SUITE ...]``."""

import argparse
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from cqs.report.measurement import _commit

from . import SUITES
from .framework import format_verdicts, judge, replace_row


def main():
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
        verdicts.append(judge(suite))
        for case, error in verdicts[-1].failed.items():
            print(f"FAILED {case}: {error}", flush=True)
        if options.out is not None:
            row = asdict(verdicts[-1]) | {"torch_version": torch.__version__, "commit": _commit()}
            replace_row(options.out, "suite", row)  # at once: all suites together take long
    print(format_verdicts(verdicts))
    return int(any(each.failed for each in verdicts))


if __name__ == "__main__":
    sys.exit(main())
