"""How the site is built from these pages, the notebooks and docstrings: ``make docs``.

The sources of the site are those of the repository, so links between folders hold in both.
"""

import inspect
import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.ext.autosummary import Autosummary, import_by_name
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.writers.html5 import HTML5Translator

import cqs

project = "cqs"
author = "the cqs authors"
version = release = cqs.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
include_patterns = ["CHANGELOG.md", "docs/**", "notebooks/*"]
exclude_patterns = [".*", "docs/notes"]
root_doc = "docs/index"
nb_execution_mode = "off"
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", ".*"),  # annotations name what is not on these pages
    ("py:.*", r"(concurrent|torch|cqs\.worker)\..*"),
]
html_theme = "furo"
html_title = f"cqs {version}"
html_show_copyright = False
html_static_path = ["_static"]
html_extra_path = ["_root"]  # leads from the root of the site to root_doc
html_css_files = ["pages.css"]

myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False


def _write_mathml(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers draw without a script from elsewhere."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def _keep_text(docstring: GoogleDocstring) -> list[str]:
    """Leave what is said of an attribute as it is: words before a colon are no type here."""
    return docstring._consume_to_next_section()


class _Summary(Autosummary):
    """A table of names with the first line of each docstring; references become literals.

    A table is not in the module of its names, so short references would not be found.
    """

    def get_items(self, names: list[str]) -> list[tuple[str, str | None, str, str]]:
        """Return name, signature, sentence and full name of every row."""
        items = []
        for shown, signature, _, name in super().get_items(names):
            text = inspect.getdoc(import_by_name(name)[1]) or ""
            line = text.partition("\n\n")[0].replace("\n", " ")
            items.append((shown, signature, re.sub(r":\w+:`~?(.*?)`", r"``\1``", line), name))
        return items


def _is_alias(app: Sphinx, what: str, name: str, member: object, *rest: object) -> bool | None:
    """Leave out fields of named tuples that nothing is said about."""
    return True if str(getattr(member, "__doc__", "")).startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    """Have formulas and docstrings written as said above."""
    app.connect("autodoc-skip-member", _is_alias)
    app.setup_extension("sphinx.ext.autosummary")
    app.add_directive("autosummary", _Summary, override=True)
    GoogleDocstring._parse_attribute_docstring = _keep_text
    app.add_html_math_renderer("mathml", (_write_mathml, None), (_write_mathml, None))
    app.config.html_math_renderer = "mathml"
