"""``cqs`` and ``python -m cqs``: one command, one module of ``cqs.commands``."""

import argparse
import io
import os
import signal
import sys
from importlib import import_module

import cqs

_COMMANDS = {
    "plan": "show who would compute what: a table, JSON or a picture",
    "demo": "attend to a real text on a private Ray cluster, checked and tabulated",
    "attend": "attend to query, key and value files",
    "doctor": "say what this machine has and which backends can run here",
    "simulate": "predict how ways to spread attention over many devices compare",
    "bench": "measure, after checking",
    "report": "write a page on what numbers of workers hold, take and gain on this machine",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status.

    With one line why: 2 for what the user can mend, 1 for a wrong answer or dead workers. Without
    a line 141, as a shell says of other tools, if the reader of the output has closed it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths are bytes, and results name them: those that are no text are printed as they are.
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        try:
            return _run_command(arguments)
        finally:
            print(end="", flush=True)  # not later: Python prints errors of its last flush
    except OSError as error:  # of the output: other errors are reported by _run_command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"cqs: {error}", file=sys.stderr)
        return 2


def _run_command(arguments: list[str] | None) -> int:
    """Run one command; return its exit status unless the reader of the output has closed it."""
    parser = argparse.ArgumentParser(
        prog="cqs",
        description=cqs.__doc__,
        epilog="\n".join(f"  {name:10}{summary}" for name, summary in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cqs {cqs.__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="command")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="see cqs command --help")
    chosen = parser.parse_args(arguments)

    command = import_module(f"cqs.commands.{chosen.command}")
    parser = argparse.ArgumentParser(prog=f"cqs {chosen.command}", description=command.__doc__)
    command.add_arguments(parser)
    try:
        command.run(parser.parse_args(chosen.options))
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError, MemoryError) as error:
        print(f"cqs {chosen.command}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        from cqs.executors.ray import TaskFailedError, WorkersFailedError
        from cqs.verify import VerificationError

        if not isinstance(error, VerificationError | WorkersFailedError | TaskFailedError):
            raise
        print(f"cqs {chosen.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
