"""Formulas reach the reader as they were written, although a code host reads a page as Markdown first."""

import re
from pathlib import Path

import pytest
from documents import markdown_files, name_of
from markdown_it import MarkdownIt
from markdown_it.token import Token

FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.S)
MARKDOWN = MarkdownIt("commonmark").enable("table")


def shown(token: Token) -> str:
    """Return the text of a paragraph, heading or cell as a reader sees it, without code."""
    texts = {"softbreak": "\n", "hardbreak": "\n", "code_inline": ""}
    return "".join(texts.get(part.type, part.content) for part in token.children or [])


def written(token: Token) -> str:
    """Return its text as it was written, without code."""
    return re.sub(r"(`+).+?\1", "", token.content, flags=re.S)


def formulas(text: str) -> tuple[list[str], list[str]]:
    """Find the formulas of a page as written, and as they are shown."""
    blocks = [token for token in MARKDOWN.parse(text) if token.type == "inline"]
    before = [formula for block in blocks for formula in FORMULA.findall(written(block))]
    return before, [formula for block in blocks for formula in FORMULA.findall(shown(block))]


@pytest.mark.parametrize("page", markdown_files(), ids=name_of)
def test_markdown_leaves_formulas_alone(page: Path) -> None:
    before, after = formulas(page.read_text(encoding="utf-8"))
    assert after == before
