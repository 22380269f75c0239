"""README and the pages under docs/: their code blocks and links."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PRESETS = sorted(path.stem for path in (ROOT / "configs" / "attention").glob("*.yaml"))
BLOCK = re.compile(r"^(?P<long><!-- long: [^\n]* -->\n)?```(?P<kind>bash|python)\n(?P<text>.*?)^```", re.M | re.S)
IN_TABLE = re.compile(r"^\|.*\| `(nmt-[^`]*)` \|$", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A code block of a page."""

    kind: str  # bash | python
    lines: list[str]  # lines of code; of bash without comments
    long: bool  # does the page mark the block as too long for a test?


def pages() -> list[Path]:
    return [README, *sorted((ROOT / "docs").rglob("*.md"))]


def markdown_files() -> list[Path]:
    return [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *pages()]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Find the code blocks of a page, and the commands in the last column of its tables."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        lines = match["text"].splitlines()
        if match["kind"] == "bash":
            lines = [line.partition(" #")[0].strip() for line in lines if line.strip() and line[0] != "#"]
        found.append(Block(match["kind"], lines, bool(match["long"])))
    return [*found, Block("bash", IN_TABLE.findall(text), False)]


def links(page: Path) -> list[str]:
    """Find the links and pictures that point to files of the project."""
    return [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not re.match(r"\w+:", link)]


def slugs(page: Path) -> set[str]:
    """Make the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
