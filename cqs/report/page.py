"""The report as one page that needs nothing else, and as Markdown."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from cqs.plotting import plot_owners
from cqs.report.sections import METHODS, Picture, Rows, Section, chapters, command, facts
from cqs.scheduler import Plan

_CHART = {"figsize": (4, 3.2)}
_MATRIX = {"figsize": (4, 4.2), "layout": "compressed"}
"""Figures, in inches of the width of a phone: letters there are as large as they say."""
_DOTS_PER_INCH = 200
"""Of matrices: they have too many parts for a drawing."""


class Drawing(NamedTuple):
    """A picture as the page has it, for light and for dark surroundings."""

    light: str
    """``data:`` URL."""
    dark: str
    caption: str


def write_report(rows: Rows, directory: Path) -> None:
    """Write ``report.html`` and ``report.md``.

    Args:
        rows: Of one settings, at least one.
        directory: Where to; it is there.

    Raises:
        NotImplementedError: if matplotlib is not installed.
    """
    (directory / "report.md").write_text(make_markdown(rows, str(directory)))
    (directory / "report.html").write_text(make_page(rows, str(directory)))


def make_page(rows: Rows, out: str) -> str:
    """Return the report as an HTML page with everything inside.

    Args:
        rows: Of one settings, at least one.
        out: The directory of the report, for the command that it names.
    """
    environment = Environment(
        loader=PackageLoader("cqs.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plans = {row.num_workers: row.make_plan() for row in rows}
    return environment.get_template("page.html").render(
        title=_title(rows),
        method=METHODS[rows[0].executor],
        facts=facts(rows),
        command=command(rows, out),
        chapters=chapters(rows),
        draw=_draw_chart,
        matrices=[_draw_matrix(plan) for _, plan in sorted(plans.items())],
    )


def make_markdown(rows: Rows, out: str) -> str:
    """Return the report as Markdown, without its pictures; arguments as for :func:`make_page`."""
    parts = [
        f"# {_title(rows)}",
        METHODS[rows[0].executor],
        "\n".join(f"- {name}: {_escape(fact)}" for name, fact in facts(rows).items()),
        f"```bash\n{command(rows, out)}\n```",
    ]
    for chapter in chapters(rows):
        parts.append(f"## {chapter.title}")
        for section in chapter.sections:
            parts += [f"### {section.title}", section.text, _markdown_table(section, chapter.rows)]
    return "\n\n".join(parts) + "\n"


def _title(rows: Rows) -> str:
    workers = sorted({row.num_workers for row in rows})
    span = f"{workers[0]} to " if len(workers) > 1 else ""
    return f"Attention over {rows[0].tokens:,} tokens by {span}{_count_workers(workers[-1])}"


def _count_workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _markdown_table(section: Section, rows: Rows) -> str:
    header, *lines = section.table(rows)
    cells = [header, ["--:"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in cells)


def _escape(text: str) -> str:
    """Keep Markdown from reading a pattern as a table or emphasis."""
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _draw_chart(picture: Picture, rows: Rows) -> Drawing:
    return _draw(lambda axes: picture.plot(rows, axes), picture.caption, "svg", _CHART)


def _draw_matrix(plan: Plan) -> Drawing:
    caption = _count_workers(plan.num_workers)
    return _draw(lambda axes: plot_owners(plan, axes).set_title(""), caption, "png", _MATRIX)


def _draw(plot: Callable[[Any], Any], caption: str, kind: str, options: dict[str, Any]) -> Drawing:
    """Draw on a transparent ground, with dark and with bright letters."""
    from matplotlib import style
    from matplotlib.figure import Figure

    urls = []
    for name in ("default", "dark_background"):
        with style.context(name):
            figure = Figure(**options)
            plot(figure.add_subplot())
            file = io.BytesIO()
            figure.savefig(
                file, format=kind, dpi=_DOTS_PER_INCH, transparent=True, bbox_inches="tight"
            )
        media = "image/svg+xml" if kind == "svg" else "image/png"
        urls.append(f"data:{media};base64,{base64.b64encode(file.getvalue()).decode()}")
    return Drawing(light=urls[0], dark=urls[1], caption=caption)
