"""Name the sentences of README and the guide that have more than 25 words, and then exit with status 1.

    python scripts/check_sentences.py [FILE ...]

Code, tables, formulas, link targets and the parts that scripts/write_pages.py writes do not count. docs/design.md, the
results and the generated references are not read.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 25
NOT_PROSE = (  # patterns of text that does not count; they are applied in this order
    r"<!-- (?:parts|figures) -->.*?<!-- end -->",
    r"<!--.*?-->",
    r"^ *```.*?^ *```",
    r"^\$\$.*?\$\$",
    r"^\*\*Paper:\*\*.*?(?=\n\n)",  # titles of papers may be long
    r"^ *\|.*?$",
    r"^\[[^\]]+\]: .*?$",
    r"!\[[^\]]*\]\([^)]*\)",
    r"(?<=\])\([^)\s]*\)",
    r"(?<=\S)\*\*$",
    r"</?\w[^>]*>",
)
CODE = r"`[^`]+`|\$[^$\n]+(?:\n[^$\n]+)?\$"  # code and formulas do not count either, but a sentence may begin with one
BLOCK = r"\n\s*\n|\n(?= *(?:[-*#]|\d+\.) )|\n(?=#)|(?<=[^\n])\n(?=!!!)"
END = r"(?<!\beq)(?<!\bal)(?<!\bsec)(?<!\bvs)[.!?][\"')*\]]*\s+(?=[^\sa-z])"


class Sentence(NamedTuple):
    line: int
    words: int
    text: str


def blank(match: re.Match[str]) -> str:
    """Return spaces and line breaks in place of the matched text, so that line numbers stay the same."""
    return re.sub(r"[^\n]", " ", match[0])


def sentences(text: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown page, with the line on which each begins."""
    for pattern in NOT_PROSE:
        text = re.sub(pattern, blank, text, flags=re.S | re.M)
    text = re.sub(CODE, lambda match: "`" + blank(match)[1:], text)
    start = 0
    for end in [*(match.end() for match in re.finditer(f"{BLOCK}|{END}", text)), len(text)]:
        part = text[start:end]
        words = [word for word in part.split() if re.search(r"\w", word)]
        if words:
            line = text.count("\n", 0, start + len(part) - len(part.lstrip())) + 1
            yield Sentence(line, len(words), " ".join(part.split()))
        start = end


def pages(root: Path) -> list[Path]:
    """List the README, the guide and the pages on attention."""
    guide = [path for path in sorted((root / "docs").glob("*.md")) if path.name != "design.md"]
    return [root / "README.md", *guide, *sorted((root / "docs" / "attention").glob("*.md"))]


def main() -> None:
    long = [
        f"{path}:{sentence.line}: {sentence.words} words: {sentence.text[:90]}"
        for path in [Path(name) for name in sys.argv[1:]] or pages(ROOT)
        for sentence in sentences(path.read_text(encoding="utf-8"))
        if sentence.words > LONGEST
    ]
    sys.exit("\n".join([*long, f"{len(long)} sentences of more than {LONGEST} words"]) if long else 0)


if __name__ == "__main__":
    main()
