"""Run what changes since a commit affect: ``python -m tests.support.touched COMMIT``.

These are faults in changed files, then published suites and long tests that are changed or import a
changed file, the most direct ones first. If the commit is not in this clone, or the dependencies
have changed, all are run. No test begins after 40 minutes: those that are left are skipped and
counted, and ``make test-all`` runs them.
"""

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path, PurePath

from tests.judged import SUITES
from tests.mutants import FAULTS

ROOT = Path(__file__).parents[2]
FOLDERS = ".", "tests", "tests/distributed", "tests/nn"
"""Where Python looks for modules, besides the folder of a test."""
READ = dict.fromkeys(("README.md", "docs"), "tests/test_documents.py") | {
    "benchmarks": "tests/benchmarks/test_pages.py",
    "examples": "tests/examples/test_ray_examples.py",
    "notebooks": "tests/test_notebooks.py",
}
"""Tests of what is read and not imported, by its first folder or name."""


def git(*arguments: str) -> list[str]:
    """Return the lines that a command of git prints."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def imported_names(file: PurePath) -> Iterator[str]:
    """Yield ``a.b`` and ``a.b.c`` for ``from a.b import c`` anywhere in a file, and other names."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(file.parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [package, node.module]))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_test(file: str) -> bool:
    """Whether pytest finds tests in a file."""
    return PurePath(file).name.startswith("test_")


def imports(files: list[str]) -> dict[str, set[str]]:
    """Return the files of the repository that each of its Python files imports."""
    known, found = set(files), {}
    for file in files:
        folders = [*FOLDERS, str(PurePath(file).parent)]
        found[file] = {
            candidate
            for name in imported_names(PurePath(file))
            for folder in folders
            for end in (".py", "/__init__.py")
            if (candidate := str(PurePath(folder, name.replace(".", "/") + end))) in known
        }
        if is_test(file):
            conftests = {str(parent / "conftest.py") for parent in PurePath(file).parents}
            found[file] |= conftests & known
    return found


def touched(changed: set[str], graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the files that have changed or import them, and the number of imports between."""
    found, new = dict[str, int](), changed
    for distance in count():
        found |= dict.fromkeys(new, distance)
        new = {file for file, names in graph.items() if file not in found and names & found.keys()}
        if not new:
            return found


def main(since: str) -> int:
    """Return 1 if a test, a published suite or a fault fails."""
    end, files = time.time() + 40 * 60, git("ls-files")
    is_known = git("rev-list", "--ignore-missing", "--no-walk", since)
    names = git("diff", "--name-only", "--diff-filter=d", since) if is_known else files
    changed = {*files} if {"constraints.txt", "pyproject.toml"} & {*names} else {*names}
    found = touched(changed, imports([file for file in files if file.endswith(".py")]))
    found |= {READ[top]: 0 for file in changed if (top := file.partition("/")[0]) in READ}
    suites = [name for name in SUITES if f"tests/judged/{name}.py" in found]
    faulty = sorted({fault.path for fault in FAULTS if f"cqs/{fault.path}" in changed})
    tests = sorted(filter(is_test, found), key=lambda file: (found[file], file))
    pytest = ["pytest", "-rfEs", "-m", "long", "--numprocesses", "2", "--dist", "loadgroup"]
    parts = [
        ["tests.mutants", "--jobs", "2", *faulty],
        ["tests.judged", *suites],
        [*pytest, "--no-loadscope-reorder", "--until", str(end), *tests],
    ]
    statuses = [
        subprocess.run([sys.executable, "-m", *part], cwd=ROOT).returncode
        for part, chosen in zip(parts, (faulty, suites, tests), strict=True)
        if chosen
    ]
    return int(not {*statuses} <= {0, 5})  # 5: none of the tests is long


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
