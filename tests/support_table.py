"""Which backend computes what of which pattern: the tables of docs/pattern-support.md.

``python tests/support_table.py`` runs every case and writes the tables anew; without a GPU it needs
``TRITON_INTERPRET=1``.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from sparse_cases import assert_gradients_right, random_bits
from support.exact import assert_answers, attend
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.cases import Case
from cqs.patterns import acsr, block_sparse, causal, documents, from_block_mask, from_mask, per_head
from cqs.patterns.text import parse_pattern
from cqs.problem import Problem
from cqs.worker import BACKENDS

PAGE = Path(__file__).parent.parent / "docs" / "pattern-support.md"
BEGIN, END = "<!-- tables of tests/support_table.py -->\n", "<!-- end of tables -->\n"


def _block_mask(q: int, k: int):
    def rule(batch, head, query, key):
        return (query - key <= 9) & (key <= query)

    return from_block_mask(create_block_mask(rule, None, None, q, k, "cpu", BLOCK_SIZE=16))


FITTED = {
    "documents([0, 21, 30, 31, 47])": lambda q, k: (
        documents([0, 21, 30, 31, q]) if q == k else documents([0, 4, 9, 9, q], [0, 21, 30, 31, k])
    ),
    "acsr(start, step, count)": lambda q, k: acsr([i // 9 for i in range(q)], [2] * q, [9] * q),
    "block_sparse(layout, 8)": lambda q, k: block_sparse(random_bits(-(-q // 8), -(-k // 8)), 8),
    "from_mask(mask)": lambda q, k: from_mask(random_bits(q, k)),
    "from_block_mask(block_mask)": _block_mask,
}
"""Patterns of given lengths, by their names in the tables."""
PATTERNS = (
    "sliding_window(20, 0)",
    "sliding_window(9, 13)",
    "dilated(5, 3, 4)",
    "strided(8)",
    "fixed(16, 3)",
    "block_diagonal(20)",
    "global_tokens([0, 3, 40])",
    "longformer(10, 3)",
    "bigbird(block=8)",
    *FITTED,
    "dilated(3, 0, 8) | sliding_window(4)",
    "block_diagonal(16) & causal()",
    "block_diagonal(16) & strided(4)",
    "causal() - sliding_window(12)",
)
_WORKERS = 3
_SQUARE = Case("square", 47, 47, num_heads=1, num_kv_heads=1)


class Cell(NamedTuple):
    backend: str
    pattern: str
    feature: str


def _forward(problem: Problem, backend: str) -> None:
    assert_answers(problem, *attend(problem, num_tasks=_WORKERS, backend=backend))


def _backward(problem: Problem, backend: str) -> None:
    assert_gradients_right(problem, num_tasks=_WORKERS, backend=backend)


def _both(problem: Problem, backend: str) -> None:
    _forward(problem, backend)
    _backward(problem, backend)


def _causal(problem: Problem, backend: str) -> None:
    """Ask with ``is_causal``; judge by the intersection."""
    asked = replace(problem, is_causal=True)
    meant = replace(problem, pattern=problem.pattern & causal())
    assert_answers(meant, *attend(asked, num_tasks=_WORKERS, backend=backend))
    assert_gradients_right(meant, num_tasks=_WORKERS, backend=backend)


def _dropout(problem: Problem, backend: str) -> None:
    """Compare with float64 in :mod:`cqs.executors.verify`, and something must have been dropped."""
    options = {"num_tasks": _WORKERS, "backend": backend, "dropout_p": 0.4, "seed": 1}
    output, _ = attend(problem, verify=True, **options)
    assert not torch.equal(output, attend(problem, num_tasks=_WORKERS, backend=backend)[0])


FEATURES: dict[str, tuple[Case, Callable[[Problem, str], None]]] = {
    "forward": (_SQUARE, _forward),
    "backward": (_SQUARE, _backward),
    "`is_causal`": (_SQUARE, _causal),
    "grouped queries": (replace(_SQUARE, num_heads=2), _both),
    "cross": (replace(_SQUARE, seqlen_q=33), _both),
    "dropout": (_SQUARE, _dropout),
    "per head": (replace(_SQUARE, num_heads=2, num_kv_heads=2), _both),
    "float16": (_SQUARE, _both),  # Triton's interpreter knows no bfloat16
}
NAMES = [name for name, backend in BACKENDS.items() if not backend.required_terms]
CELLS = [Cell(b, p, f) for b in NAMES for p in PATTERNS for f in FEATURES]


def run(cell: Cell) -> str:
    """Compute a case and compare it with float64; return ``yes`` or why it is refused."""
    case, check = FEATURES[cell.feature]
    device = "cuda" if cell.backend == "triton" and torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if cell.feature == "float16" else torch.float32
    fit = FITTED.get(cell.pattern, lambda q, k: parse_pattern(cell.pattern))
    pattern = fit(case.seqlen_q, case.seqlen_kv)
    if cell.feature == "per head":
        pattern = per_head([[pattern, causal()]])
    try:
        check(replace(case, pattern=pattern).make(dtype, device), cell.backend)
    except NotImplementedError as refusal:
        return (
            str(refusal).partition(": backend=None")[0].removeprefix(f"backend {cell.backend!r} ")
        )
    except ValueError as refusal:
        return str(refusal).removeprefix(f"{pattern!r} ").partition(",")[0]
    return "yes"


def format_tables(found: dict[Cell, str]) -> str:
    """Lay out a table for each backend; backends that do the same share one."""
    reasons = list(dict.fromkeys(text for text in found.values() if text != "yes"))
    shared: dict[str, list[str]] = {}
    for backend in NAMES:
        rows = []
        for pattern in PATTERNS:
            texts = [found[Cell(backend, pattern, feature)] for feature in FEATURES]
            cells = [t if t == "yes" else f"no [{reasons.index(t) + 1}]" for t in texts]
            name = pattern.replace("|", r"\|")
            rows.append(" | ".join([f"| `{name}`", *cells]) + " |")
        shared.setdefault("\n".join(rows), []).append(f"`{backend}`")
    header = " | ".join(["| pattern", *FEATURES]) + " |\n|---" + "|---" * len(FEATURES) + "|\n"
    tables = [f"{', '.join(names)}:\n\n{header}{rows}\n" for rows, names in shared.items()]
    notes = "".join(f"- [{i}] {reason}\n" for i, reason in enumerate(reasons, 1))
    return "\n".join([*tables, notes])


def read_tables(text: str) -> dict[Cell, str]:
    """Read back what :func:`format_tables` wrote."""
    reasons = dict(re.findall(r"^- (\[\d+\]) (.*)$", text, re.MULTILINE))
    found = {}
    for names, header, rows in re.findall(
        r"^(`.*`):\n\n\| pattern \| (.*) \|\n.*\n((?:\|.*\n)+)", text, re.MULTILINE
    ):
        for row in rows.splitlines():
            pattern, *cells = re.split(r" (?<!\\)\| ", row[2:-2])
            pattern = pattern.strip("`").replace(r"\|", "|")
            for feature, cell in zip(header.split(" | "), cells, strict=True):
                for backend in names.replace("`", "").split(", "):
                    answer = reasons[cell.removeprefix("no ")] if cell != "yes" else cell
                    found[Cell(backend, pattern, feature)] = answer
    return found


def page_tables() -> str:
    """Return the text of the tables in the page."""
    return PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    torch.manual_seed(0)
    tables = format_tables({cell: run(cell) for cell in CELLS})
    PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")
