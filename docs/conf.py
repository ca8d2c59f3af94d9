"""Settings of the documentation site: `sphinx-build -W -n docs docs/_build` makes it."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import ds_hessian

project = "ds_hessian"
version = release = ds_hessian.__version__
html_title = f"ds_hessian {version}"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "dollarmath"]
html_math_renderer = "mathml"  # browsers typeset it themselves, also without network
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
toc_object_entries_show_parents = "hide"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "NDArray": "NDArray", "Array": "NDArray"}
default_role = "literal"  # docstrings mark code with single backticks, and norms with bars
nitpick_ignore_regex = [("py:.*", r"(?!ds_hessian\b).*")]  # names of other packages
nitpick_ignore_regex += [("py:class", r"ds_hessian\..*\.[A-Z]")]  # type variables


def _escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """`|Hv|` is a norm, not a substitution of reStructuredText."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda m: m[1] or r"\|", line) for line in lines]


def _equation(as_block: bool) -> tuple[Any, None]:
    """Return the functions that write an equation as MathML: on entering its node, and after."""

    def visit(translator: Any, node: nodes.math | nodes.math_block) -> None:
        mathml = tex2mathml(node.astext(), as_block=as_block)
        translator.body.append(f"<div class='equation'>{mathml}</div>" if as_block else mathml)
        raise nodes.SkipNode

    return visit, None


def setup(app: Any) -> None:
    """Connect the hook and the renderer of equations."""
    app.connect("autodoc-process-docstring", _escape_bars)
    app.add_html_math_renderer("mathml", _equation(as_block=False), _equation(as_block=True))
