"""Turn LaTeX in Markdown into MathML while the site is built: browsers draw it without a script or a network.

`$x$` and `$$x$$` reach this hook as <span|div class="arithmatex">; see pymdownx.arithmatex in mkdocs.yml.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)

NAME = re.compile(r"<mo>([A-Za-z]{2,})</mo>")  # such as softmax, one name: an operator would get space on both sides


def to_mathml(tex: str, display: str) -> str:
    """LaTeX -> MathML. Raises ValueError for a command that the converter does not know, which it would print."""
    mathml = NAME.sub(r"<mi>\1</mi>", convert(tex.strip().replace(r"\mathrm", r"\operatorname"), display=display))
    if unknown := re.search(r"\\\w+", mathml):
        raise ValueError(f"unknown LaTeX command {unknown[0]} in {tex.strip()}")
    return mathml


def on_page_content(content: str, page: Any, **_: Any) -> str:  # noqa: ANN401
    """Called by MkDocs with the HTML of each page."""

    def mathml(formula: re.Match[str]) -> str:
        tex = html.unescape(formula[3])
        try:
            if formula[2] == "(":
                return to_mathml(tex, "inline")
            parts = [to_mathml(part, "block") for part in tex.split(r"\qquad")]  # narrow screens break between them
        except ValueError as error:
            raise PluginError(f"{page.file.src_uri}: {error}") from None
        return f'<div class="formula">{"".join(parts)}</div>'

    return FORMULA.sub(mathml, content)
