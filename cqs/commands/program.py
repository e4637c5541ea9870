"""Options, exit statuses and errors of programs with several commands."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import cqs

Command = tuple[ModuleType, Callable[[argparse.Namespace], object]]
"""A module with a docstring and ``add_arguments``, and a function that takes its options."""

_MARKS_OF_SIZE = "DefaultCPUAllocator", "Storage size calculation overflowed", "CUDA out of memory"
"""What PyTorch says of tensors that do not fit; it has no error type for those on the CPU."""


def run_program(
    program: str,
    description: str | None,
    summaries: Mapping[str, str],
    load: Callable[[str], Command],
    arguments: list[str] | None = None,
    examples: Sequence[str] = (),
) -> int:
    """Run one command, or print the help if none is named; return the exit status.

    The status is 2 for errors that the user can correct, and 1 for a wrong result or failed
    workers; both print one line. It is 141, without a line, if the reader of the output closed it.

    Args:
        program: Name of the program.
        description: Description of the program for ``--help``.
        summaries: Name and summary of every command.
        load: Function that returns the command of a name.
        arguments: Words of the command line; ``None`` means those of this process.
        examples: Command lines for ``--help``.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller: no other file may take its number
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Results contain paths, which are bytes: invalid Unicode is printed unchanged.
        sys.stdout.reconfigure(errors="surrogateescape")
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:10}{summary}" for name, summary in summaries.items()),
                *(["", "examples:"] if examples else []),
                *(f"  {example}" for example in examples),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cqs {cqs.__version__}")
    parser.add_argument("command", nargs="?", choices=summaries, metavar="command")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=f"see {program} command --help")
    try:
        try:
            return _run_command(parser, load, arguments)
        finally:
            print(end="", flush=True)  # not later: Python prints errors of its last flush
    except OSError as error:  # of the output: other errors are reported by _run_command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def _run_command(
    parser: argparse.ArgumentParser, load: Callable[[str], Command], arguments: list[str] | None
) -> int:
    """Run one command; return its exit status unless the reader of the output has closed it."""
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    (module, run), name = load(chosen.command), f"{parser.prog} {chosen.command}"
    parser = argparse.ArgumentParser(prog=name, description=module.__doc__)
    module.add_arguments(parser)
    for action in parser._actions:
        _state_default(action)
    try:
        run(parser.parse_args(chosen.options))
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError, MemoryError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if any(mark in str(error) for mark in _MARKS_OF_SIZE):
            print(f"{name}: too little memory: {error}".partition("\n")[0], file=sys.stderr)
            return 2
        from cqs.executors.ray import TaskFailedError, WorkersFailedError
        from cqs.executors.verify import VerificationError

        if not isinstance(error, VerificationError | WorkersFailedError | TaskFailedError):
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def _state_default(action: argparse.Action) -> None:
    """Add the default of an option to its help, unless the help states one."""
    has_value = action.nargs != 0 and action.default not in (None, argparse.SUPPRESS)
    if action.option_strings and has_value and "default" not in (action.help or ""):
        stated = f"default: {action.default}"
        action.help = f"{action.help}; {stated}" if action.help else stated
