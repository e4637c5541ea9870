"""Hold every part of the project to a budget of lines, parameters and words.

``python -m tests.support.budgets`` lists what exceeds its budget. A line of code is a physical line
that holds a token of Python, without docstrings and comments. A change that makes a part smaller
lowers its budget. A budget is never raised to let a change pass.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Budget(NamedTuple):
    """The most that a part may have."""

    lines: int
    """Lines of code."""
    largest_file: int
    """Lines of code of its largest file."""
    parameters: int
    """Parameters of a public function."""


BUDGETS = {
    "cqs": Budget(508, 115, 17),
    "cqs/patterns": Budget(1881, 220, 6),
    "cqs/scheduler": Budget(2091, 191, 8),
    "cqs/problem": Budget(886, 303, 14),
    "cqs/partial": Budget(414, 200, 4),
    "cqs/tiler": Budget(62, 52, 2),
    "cqs/worker": Budget(1651, 272, 8),
    "cqs/worker/triton": Budget(3662, 536, 6),
    "cqs/executors": Budget(991, 146, 13),
    "cqs/executors/distributed": Budget(3252, 279, 17),
    "cqs/executors/streaming": Budget(1390, 252, 18),
    "cqs/executors/ray": Budget(2496, 290, 17),
    "cqs/integrations": Budget(1561, 255, 15),
    "cqs/nn": Budget(355, 99, 3),
    "cqs/plotting": Budget(349, 102, 4),
    "cqs/report": Budget(834, 126, 7),
    "cqs/commands": Budget(961, 152, 6),
    "benchmarks": Budget(6572, 645, 0),
    "tests": Budget(19_333, 515, 0),
}
"""A file belongs to the part with the longest path that contains it."""
MOST_WORDS = {"docs": 41_148, "docs/notes": 1_243, "benchmarks/journal": 6_000}
"""Folder -> words of its pages, without those of a longer path in this table."""
DICTATED = {"cqs/integrations/flex.py": "FlexAttention"}
"""Path -> the library that dictates the signatures of its functions, which are not counted."""
NAMES = "lines of code", "lines of its largest file", "parameters of a public function"
"""The fields of a budget, in words."""


class Excess(NamedTuple):
    """A count above its budget."""

    part: str
    what: str
    count: int
    budget: int

    def __str__(self) -> str:
        return f"{self.part}: {self.what} must be at most {self.budget:,}, got {self.count:,}"


def code_lines(text: str) -> int:
    """Return the number of lines of code of a Python file."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    silent.add(tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in silent} - skipped)


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public functions and methods, without kernels and operators of PyTorch."""
    bodies = [tree.body]
    bodies += [
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    ]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            made_by = " ".join(map(ast.unparse, node.decorator_list))
            if node.name[0] != "_" and "jit" not in made_by and "operator" not in made_by:
                yield node


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, fields: dict[str, int]) -> int:
    """Return the number of parameters; those of an unpacked TypedDict count as its fields.

    Args:
        function: The function.
        fields: Name of a TypedDict -> its number of fields.
    """
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    count = len([name for name in names if name not in ("self", "cls")])
    if given.kwarg is not None and given.kwarg.annotation is not None:
        options = ast.unparse(given.kwarg.annotation)
        if options.startswith("Unpack["):
            count += fields[options.removeprefix("Unpack[").removesuffix("]").strip("'\"")]
    return count


def typed_dicts(trees: list[ast.Module]) -> dict[str, int]:
    """Return the number of fields of each TypedDict by name, inherited ones included."""
    classes = {
        node.name: node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def count(name: str) -> int:
        node = classes.get(name)
        if node is None:
            return 0
        own = sum(isinstance(line, ast.AnnAssign) for line in node.body)
        return own + sum(count(ast.unparse(base)) for base in node.bases)

    return {name: count(name) for name in classes}


def part_of(path: str, parts: Iterable[str]) -> str:
    """Return the part of the longest path that contains a file, or an empty text."""
    return max((part for part in parts if path.startswith(f"{part}/")), key=len, default="")


def measure(root: Path) -> Counter[tuple[str, str]]:
    """Return what every part has, in the files below a folder: a count for each of ``NAMES``."""
    paths = [path for top in ("cqs", "benchmarks", "tests") for path in (root / top).rglob("*.py")]
    texts = {str(path.relative_to(root)): path.read_text() for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    fields, counts = typed_dicts(list(trees.values())), Counter[tuple[str, str]]()
    texts.pop("tests/mutants.py", None)
    for path, text in texts.items():
        part, number = part_of(path, BUDGETS), code_lines(text)
        parameters = [num_parameters(each, fields) for each in public_functions(trees[path])]
        most = max(parameters, default=0) if part.startswith("cqs") and path not in DICTATED else 0
        counts[part, NAMES[0]] += number
        counts[part, NAMES[1]] = max(counts[part, NAMES[1]], number)
        counts[part, NAMES[2]] = max(counts[part, NAMES[2]], most)
    pages = (root / top for top in ("docs", "benchmarks/journal"))
    for path in (path for folder in pages for path in folder.rglob("*.md")):
        part = part_of(str(path.relative_to(root)), MOST_WORDS)
        counts[part, "words"] += len(path.read_text().split())
    return counts


def find_excesses(root: Path) -> list[Excess]:
    """Return what exceeds its budget in the files below a folder."""
    counts = measure(root)
    budgets = [(part, *each) for part in BUDGETS for each in zip(NAMES, BUDGETS[part], strict=True)]
    budgets += [(part, "words", most) for part, most in MOST_WORDS.items()]
    return [
        Excess(part, name, count, budget)
        for part, name, budget in budgets
        if (count := counts[part, name]) > budget
    ]


if __name__ == "__main__":
    excesses = find_excesses(ROOT)
    print(*excesses, f"{len(excesses)} budgets exceeded", sep="\n")
    sys.exit(bool(excesses))
