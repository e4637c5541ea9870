"""Options that several benchmarks have in common."""

import argparse

from cqs.commands.options import parse_integer, parse_integers

CAUSAL = {"no": [False], "yes": [True], "both": [False, True]}
"""Choices of ``--causal``, and whether the cases of each are causal."""


def add_common(parser: argparse.ArgumentParser, *, several_lengths: bool = False) -> None:
    """Declare sequence length, number of repeats and output file."""
    parser.add_argument(
        "--seqlen",
        type=parse_integers if several_lengths else parse_integer,
        metavar="N,N,..." if several_lengths else "N",
        help="default: as published",
    )
    parser.add_argument("--repeats", type=int, metavar="R", help="default: as published")
    parser.add_argument("--out", metavar="FILE.jsonl", help="append the rows to this file")


def add_heads(parser: argparse.ArgumentParser, default: int, head_dim: int = 128) -> None:
    """Declare numbers of heads and their dimension, with the defaults that the help names."""
    parser.add_argument("--heads", type=int, metavar="H", help=f"default: {default}")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="default: as many")
    parser.add_argument("--head-dim", type=int, metavar="D", help=f"default: {head_dim}")


def add_passes(parser: argparse.ArgumentParser, *, backward: str = "yes") -> None:
    """Declare whether cases are causal, and whether they have a backward pass."""
    parser.add_argument("--causal", choices=CAUSAL, help="default: both")
    parser.add_argument("--backward", choices=("yes", "no"), help=f"default: {backward}")
