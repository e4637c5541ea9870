"""Measure, after checking: one JSON row per measurement, and a table."""

import argparse
from importlib import import_module

_BENCHMARKS = ("tasks", "kernels", "accuracy", "memory", "ray", "patterns")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    parser.add_argument("benchmark", choices=_BENCHMARKS)
    parser.add_argument("--tokens", type=int, metavar="N", help="default: as published")
    parser.add_argument("--repeats", type=int, metavar="R", help="default: as published")
    parser.add_argument("--only", metavar="NAME,NAME", help="patterns: those with such names")
    parser.add_argument("--out", metavar="FILE.jsonl", help="append the rows to this file")


def run(options: argparse.Namespace) -> None:
    """Run one benchmark."""
    benchmark = import_module(f"cqs.bench.{options.benchmark}")
    given = {name: getattr(options, name) for name in ("repeats", "only")}
    given = {name: value for name, value in given.items() if value is not None}
    if "only" in given and options.benchmark != "patterns":
        raise ValueError("--only goes with patterns")
    benchmark.run(tokens=options.tokens, out=options.out, **given)
