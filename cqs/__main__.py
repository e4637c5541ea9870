"""``cqs`` and ``python -m cqs``: one command, one module of ``cqs.commands``."""

import sys
from importlib import import_module

import cqs
from cqs.commands.program import Command, run_program

_COMMANDS = {
    "plan": "show the tasks of a plan: a table, JSON or a picture",
    "demo": "compute attention on a private Ray cluster and verify it",
    "attend": "compute attention from query, key and value files",
    "doctor": "show the devices of this machine and the backends that it supports",
    "simulate": "compare the predicted costs of context-parallel methods",
    "report": "measure memory, time and speed-up by number of tasks on this machine",
}


_EXAMPLES = (
    "cqs doctor",
    "cqs demo --seqlen 4096",
    "cqs plan --tasks 7 --is-causal",
    "cqs attend q.npy k.npy v.npy output.npy --tasks 7",
    "cqs simulate --devices 8,64 --seqlen 1M",
    "cqs report --tasks 1,7,13",
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status, as :func:`run_program` does."""
    return run_program("cqs", cqs.__doc__, _COMMANDS, _load, arguments, _EXAMPLES)


def _load(name: str) -> Command:
    module = import_module(f"cqs.commands.{name}")
    return module, module.run


if __name__ == "__main__":
    sys.exit(main())
