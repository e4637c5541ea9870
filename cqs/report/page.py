"""The report as one page that needs nothing else, and as Markdown."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from cqs.plotting import plot_owners
from cqs.report.content import Content, Picture
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


def write_report(content: Content, directory: Path) -> None:
    """Write ``report.html`` and ``report.md`` into a directory that is there.

    Raises:
        NotImplementedError: if matplotlib is not installed.
    """
    (directory / "report.md").write_text(make_markdown(content))
    (directory / "report.html").write_text(make_page(content))


def make_page(content: Content) -> str:
    """Return the report as an HTML page with everything inside."""
    environment = Environment(
        loader=PackageLoader("cqs.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        **content._asdict(),
        draw=_draw_chart,
        matrices=[_draw_matrix(plan) for plan in content.plans],
    )


def make_markdown(content: Content) -> str:
    """Return the report as Markdown, without its pictures."""
    parts = [
        f"# {content.title}",
        content.method,
        "\n".join(f"- {name}: {_escape(fact)}" for name, fact in content.facts.items()),
        f"```bash\n{content.command}\n```",
    ]
    for chapter in content.chapters:
        parts.append(f"## {chapter.title}")
        for section in chapter.sections:
            table = _markdown_table(chapter.table(section))
            parts += [f"### {section.title}", section.text, table]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: list[list[str]]) -> str:
    header, *lines = table
    cells = [header, ["--:"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in cells)


def _escape(text: str) -> str:
    """Keep Markdown from reading a pattern as a table or emphasis."""
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"\\{sign}")
    return text


def _draw_chart(picture: Picture, rows: Sequence[Any]) -> Drawing:
    return _draw(lambda axes: picture.plot(rows, axes), picture.caption, "svg", _CHART)


def _draw_matrix(plan: Plan) -> Drawing:
    caption = "1 worker" if plan.num_workers == 1 else f"{plan.num_workers} workers"
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
