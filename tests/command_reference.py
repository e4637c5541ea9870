"""The options of all commands: the tables of docs/commands.md.

``python tests/command_reference.py`` writes the tables anew, from the parsers of the commands.
"""

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from cqs.__main__ import _COMMANDS
from cqs.commands.program import _state_default

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
BEGIN, END = "<!-- tables of tests/command_reference.py -->\n", "<!-- end of tables -->\n"


def format_tables() -> str:
    """Lay out one section for each command."""
    return "\n".join(line for name in _COMMANDS for line in _section(name))


def _section(name: str) -> Iterator[str]:
    module = import_module(f"cqs.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"cqs {name}")
    module.add_arguments(parser)
    yield from (f"## cqs {name}", "", (module.__doc__ or "").strip(), "")
    actions = [action for action in parser._actions if action.dest != "help"]
    if actions:
        yield from ("| argument | meaning |", "|---|---|")
        for action in actions:
            _state_default(action)
            text = " ".join((action.help or "").split()).replace("|", "\\|")
            yield f"| {_names(action)} | {text} |"
        yield ""


def _names(action: argparse.Action) -> str:
    """Return the names of an option with its value, or the name of an argument."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices is not None:
        value = ", ".join(map(str, action.choices))
        return f"`{action.option_strings[0]}`: {value}"
    return ", ".join(f"`{name} {value}`".replace(" `", "`") for name in action.option_strings) or (
        f"`{value}`"
    )


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{format_tables()}\n{END}{after}")
