"""Formulas as MathML, made when the site is built: browsers draw it themselves, so a page loads no program for it."""

from __future__ import annotations

import re

from docutils import nodes
from math_core import LatexToMathML

CONVERTER = LatexToMathML()  # raises LatexError on what it does not know, which stops the build


def mathml(tex: str, displaystyle: bool) -> str:
    """A formula of TeX as an element of a page."""
    if re.search(r"\\\\|(?<!\\)&", tex) and r"\begin{" not in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"  # as Sphinx does for its other renderers
    return CONVERTER.convert_with_local_state(tex, displaystyle=displaystyle)


def inline(translator, node) -> None:
    """A formula within a line."""
    translator.body.append(mathml(node.astext(), False))
    raise nodes.SkipNode


def block(translator, node) -> None:
    """A formula with lines of its own; an empty line begins another one."""
    parts = re.split(r"\n\s*\n", node.astext().strip())
    formulas = "".join(mathml(part, True) for part in parts)
    translator.body.append(translator.starttag(node, "div", CLASS="formulas") + formulas + "</div>")
    raise nodes.SkipNode


def setup(app):
    """Add the renderer, which ``html_math_renderer`` selects."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
