"""List words and sentences that the glossary rules out.

``python -m tests.support.language [PATH...]`` looks at names, docstrings, comments, errors, pages
and notebooks. The words are those that the project once used for terms of the field. Sentences have
at most 35 words.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = """
    cqs benchmarks examples tests docs notebooks
    README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md
""".split()
WORDS = re.compile(
    r"""\b(
        [Cc]arriers? | [Pp]arcels? | [Ll]anes? | [Rr]ecipes? | [Pp]atience | [Tt]roubles? |
        [Uu]nder[_ ]?[Ww]ay | [Ss]tray(s|ed|ing)? | [Bb]ur(y|ied|ies) | [Mm]ourn(s|ed)? |
        [Bb]lamed? | (is|was)[ ]shot | [Ll]ikewise | [Dd]ied | dies | dead | deaths? |
        travel(s|led|ling)? |
        way[ ]in | way[ ]out | ways[ ]to | to[ ]the[ ]bit | not[ ]a[ ]bit | the[ ]same[ ]bits |
        but[ ]for | key[ ]heads? | slices[ ]of[ ]the[ ]heads | callers[ ]wait | come[ ]to[ ]meet |
        is[ ]no[ ]more
    )\b""",
    re.VERBOSE,
)
EMPTY_NAME = re.compile(r"_?(of_\w+|found|each)")
"""Names that say nothing of a value: in the package, a value has a noun of the field."""
ENTRY = re.compile(r"^\s+\w+: (Of|That|Which|As for|Likewise)\b", re.MULTILINE)
MOST_WORDS = 35
SKIPPED = "tests/support/language.py", "docs/glossary.md"
"""The list itself, and the page that names what is not said."""


def texts_of_python(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether it is prose, for names, strings and comments."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string, False
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            yield token.start[0], token.string, False
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            value = each.value if isinstance(each, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield each.lineno, value.value, True


def texts_of_page(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the paragraphs of a Markdown page, without code, tables and formulas."""
    outside = re.sub(r"```.*?```|\$\$.*?\$\$", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    line = 1
    for paragraph in outside.split("\n\n"):
        is_prose = not paragraph.lstrip().startswith(("|", "#", "<", "-", "*", ":"))
        yield line, paragraph, is_prose
        line += paragraph.count("\n") + 2


def texts_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether sentences are counted."""
    if path.suffix == ".py":
        yield from texts_of_python(path)
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            yield number, "".join(cell["source"]), False
    else:
        yield from texts_of_page(path.read_text())


def long_sentences(text: str) -> Iterator[int]:
    """Yield the number of words of every sentence that has too many; skip examples and tables."""
    prose = re.sub(r"(?m)^\s*(>>>|\.\.\.|[-=]{3,}).*$|^.*\S {2,}\S.*$|``[^`]*``|`[^`]*`", "x", text)
    prose = re.split(r"\n\s*\n|\n\s+\w+: |\n\s*(?:Args|Returns|Raises|Example|Yields):", prose)
    for paragraph in prose:
        for sentence in re.split(r"(?<=[.!?:;])\s", paragraph):
            if (number := len(sentence.split())) > MOST_WORDS:
                yield number


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and description of everything that the glossary rules out in a file."""
    if str(path.relative_to(ROOT)) in SKIPPED:
        return
    is_package = path.is_relative_to(ROOT / "cqs")
    for line, text, is_prose in texts_of(path):
        if is_package and EMPTY_NAME.fullmatch(text):
            yield line, f"name: {text}"
        for found in WORDS.finditer(text.replace("_", " ") if text.isidentifier() else text):
            yield line, f"word: {found[0]}"
        if is_prose:
            for entry in ENTRY.finditer(text):
                yield line, f"entry: {entry[0].strip()}"
            for number in long_sentences(text):
                yield line, f"sentence of {number} words"


def main(paths: list[str]) -> int:
    """Print the findings; return 1 if there are any."""
    total = 0
    for top in paths or PATHS:
        root = ROOT / top
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in files:
            if path.suffix not in (".py", ".md", ".ipynb") or "notes" in path.parts:
                continue
            for line, found in findings(path):
                print(f"{path.relative_to(ROOT)}:{line}: {found}")
                total += 1
    print(f"{total} findings")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
