"""Options that several commands take, and notes about them."""

import argparse
import sys

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


def note_idle(number: int, tokens: int, name: str = "tasks") -> None:
    """Note that there are more tasks than tokens."""
    if number > tokens:
        note = f"{number:,} {name} for {tokens:,} tokens: those without tokens compute nothing"
        print(note, file=sys.stderr)


def note_start(address: str | None = None) -> None:
    """Note that a private Ray starts, which takes a while."""
    if address is None:
        print("starting Ray on this machine, which takes 10 to 30 s", file=sys.stderr, flush=True)
