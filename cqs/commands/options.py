"""Options that several commands take, and notes about them."""

import argparse
import sys
from functools import partial
from typing import Any

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def parse_integer(text: str) -> int:
    """Read an integer; of any size, which the command is to check.

    Raises:
        argparse.ArgumentTypeError: if it is none.

    Example:
        >>> [parse_integer(text) for text in ("4096", "64K", "1M", "1e9")]
        [4096, 65536, 1048576, 1000000000]
    """
    unit = _UNITS.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    for kind in (int, float):
        try:
            value = kind(number) * unit
        except ValueError:
            continue
        if value % 1 == 0:
            return int(value)
    raise argparse.ArgumentTypeError(f"must be integers such as 8, 64K, 1M, got {text!r}")


def parse_integers(text: str) -> list[int]:
    """Read integers with commas between them.

    Example:
        >>> parse_integers("8,64K")
        [8, 65536]
    """
    return [parse_integer(part) for part in text.split(",")]


def add_causal(parser: argparse.ArgumentParser, *, default: bool) -> None:
    """Declare ``--causal``, ``--is-causal`` and their opposites."""
    parser.add_argument(
        "--is-causal", "--causal", action=argparse.BooleanOptionalAction, default=default,
        help=f"whether attention is causal; default: {'yes' if default else 'no'}",
    )  # fmt: skip


def add_heads(parser: argparse.ArgumentParser, num_heads: int, head_dim: int, *helps: str) -> None:
    """Declare ``--heads``, ``--kv-heads`` and ``--head-dim``.

    Args:
        parser: Parser of the command.
        num_heads: Default number of query heads.
        head_dim: Default size of a head.
        helps: Help of ``--heads`` and of ``--head-dim``, if any.
    """
    add: Any = partial(parser.add_argument, type=int, metavar="H")
    heads_help, head_dim_help = helps or (None, None)
    add("--heads", "--num-heads", dest="num_heads", default=num_heads, help=heads_help)
    text = "default: as many as heads"
    add("--kv-heads", "--num-kv-heads", dest="num_kv_heads", help=text)
    add("--head-dim", default=head_dim, metavar="D", help=head_dim_help)


def note_idle(number: int, tokens: int, name: str = "tasks") -> None:
    """Note that there are more tasks than tokens."""
    if number > tokens:
        note = f"{number:,} {name} for {tokens:,} tokens: those without tokens compute nothing"
        print(note, file=sys.stderr)


def note_start(address: str | None = None) -> None:
    """Note that a private Ray starts, which takes a while."""
    if address is None:
        print("starting Ray on this machine, which takes 10 to 30 s", file=sys.stderr, flush=True)
