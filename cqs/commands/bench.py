"""Measure, after checking: one JSON row per measurement, and a table."""

import argparse
from importlib import import_module

from cqs.bench.measurement import check_rows
from cqs.commands.integers import parse_integers
from cqs.commands.written_files import check_written
from cqs.scheduler.arguments import as_integer

_BENCHMARKS = (
    "tasks", "kernels", "accuracy", "memory", "ray", "patterns", "peers", "streaming", "block",
    "sharded",
)  # fmt: skip

_OF_ANY_SHAPE = "peers", "streaming", "block", "sharded"
"""They take several lengths, and numbers of heads."""
_ALLOWED = {
    "only": ("patterns", "peers", "sharded"),
    "picture": ("patterns",),
    **dict.fromkeys(("causal", "backward"), ("peers", "streaming")),
    **dict.fromkeys(("budget", "part"), ("streaming",)),
    **dict.fromkeys(("workers", "deaths"), ("sharded",)),
    "backend": ("peers",),
}
"""Options -> benchmarks that take them, where those are not :data:`_OF_ANY_SHAPE`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    parser.add_argument("benchmark", choices=_BENCHMARKS)
    parser.add_argument(
        "--seqlen", type=parse_integers, metavar="N", help="default: as published; peers: N,N"
    )
    parser.add_argument("--repeats", type=int, metavar="R", help="default: as published")
    parser.add_argument("--out", metavar="FILE.jsonl", help="append the rows to this file")
    parser.add_argument(
        "--only",
        metavar="NAME,NAME",
        help="patterns: those with such names; peers: these methods; sharded: deaths there",
    )
    parser.add_argument("--picture", metavar="FILE", help="patterns: draw the speed-ups")
    peers = parser.add_argument_group(
        "peers and block, started by torchrun, streaming, and sharded, which starts Ray"
    )
    peers.add_argument("--heads", type=int, metavar="H", help="default: 16; block: 8")
    peers.add_argument("--kv-heads", type=int, metavar="H", help="default: as many")
    peers.add_argument("--head-dim", type=int, metavar="D", help="default: 128")
    peers.add_argument(
        "--causal", choices=("yes", "no", "both"), help="peers, streaming; default: both"
    )
    peers.add_argument(
        "--backward", choices=("yes", "no"), help="peers, default: yes; streaming, default: no"
    )
    peers.add_argument("--backend", metavar="NAME", help='peers, also "best"; default: triton')
    streaming = parser.add_argument_group("streaming")
    streaming.add_argument("--budget", metavar="BYTES", help="such as 4GiB; default: a quarter")
    streaming.add_argument("--part", action="store_true", default=None, help="one block alone")
    sharded = parser.add_argument_group("sharded")
    sharded.add_argument(
        "--workers", type=int, metavar="W", help="default: one for each GPU, or core"
    )
    sharded.add_argument(
        "--deaths",
        type=int,
        metavar="T",
        help="how often half of them are killed, at any moment and in each part; default: 0",
    )


def run(options: argparse.Namespace) -> None:
    """Run one benchmark."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    name, tokens = given.pop("benchmark"), given.pop("seqlen", None)
    for option in given.keys() - {"repeats", "out"}:
        allowed = _ALLOWED.get(option, _OF_ANY_SHAPE)
        if name not in allowed:
            raise ValueError(f"{_flag(option)} goes with {' or '.join(allowed)}")
    for option in given.keys() & {"repeats", "heads", "kv_heads", "head_dim", "workers"}:
        as_integer(_flag(option), given[option], 1)
    if "out" in given:
        check_rows(given["out"])
    if "picture" in given:
        check_written("--picture", given["picture"], [given.get("out")])
    if "deaths" in given:
        as_integer("--deaths", given["deaths"], 0)
    for length in tokens or []:
        as_integer("--seqlen", length, 1)
    if tokens is not None and name not in _OF_ANY_SHAPE:
        if len(tokens) > 1:
            raise ValueError(f"several --seqlen go with {' or '.join(_OF_ANY_SHAPE)}, got {tokens}")
        (tokens,) = tokens
    import_module(f"cqs.bench.{name}").run(tokens=tokens, **given)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
