"""``cqs`` and ``python -m cqs``: one command, one module of ``cqs.commands``."""

import sys
from importlib import import_module

import cqs
from cqs.commands.program import Command, run_program

_COMMANDS = {
    "plan": "show who would compute what: a table, JSON or a picture",
    "demo": "attend to a real text on a private Ray cluster, checked and tabulated",
    "attend": "attend to query, key and value files",
    "doctor": "say what this machine has and which backends can run here",
    "simulate": "predict how ways to spread attention over many devices compare",
    "report": "write a page on what numbers of workers hold, take and gain on this machine",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status, as :func:`run_program` does."""
    return run_program("cqs", cqs.__doc__, _COMMANDS, _load, arguments)


def _load(name: str) -> Command:
    return Command.of(import_module(f"cqs.commands.{name}"))


if __name__ == "__main__":
    sys.exit(main())
