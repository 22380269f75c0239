"""Fill the pages of the attention presets: their parts from configs/, their figures from the table of the demo corpus.

`<!-- parts -->` and `<!-- figures -->` mark the places in docs/attention/NAME.md.
"""

import re
from pathlib import Path
from typing import Any

import yaml

PARTS = {
    "score": "Score",
    "window": "Window",
    "normalizer": "Normalizer",
    "alignment": "Alignment",
    "coverage": "Coverage",
    "projection": "Projection",
    "/encoder": "Encoder",
    "/decoder": "Decoder",
}
ENCODER = {
    "layers": "Encoder layers",
    "bidirectional": "Both directions",
    "residual": "Residual connections from layer",
}
DECODER = {
    "layers": "Decoder layers",
    "residual": "Residual connections from layer",
    "attend": "Attends",
    "input_feeding": "Input feeding",
    "readout": "Readout",
    "bridge": "First state",
}


def parts(root: Path, name: str) -> str:
    """A Markdown table of the parts that a preset is made of."""
    values = yaml.safe_load((root / "configs" / "attention" / f"{name}.yaml").read_text(encoding="utf-8"))
    rows = []
    for entry in values.get("defaults", []):
        if isinstance(entry, dict):
            ((group, choice),) = entry.items()
            part = group.removeprefix("override ").partition("@")[0]
            name = part.removeprefix("/") if part.startswith("/") else f"attention/{part}"
            rows.append((PARTS[part], f"`{name}={choice}`"))
    if "context" in values["attention"]:
        rows.append(("Context", f"`attention.context={values['attention']['context']}`"))
    for section, titles in (("encoder", ENCODER), ("decoder", DECODER)):
        own = values.get(section, {})
        rows += [(title, f"`{section}.{key}={str(own[key]).lower()}`") for key, title in titles.items() if key in own]
    return "\n".join(["| Part | Setting |", "|---|---|", *(f"| {title} | {setting} |" for title, setting in rows)])


def figures(root: Path, name: str) -> str:
    """The header and the one row of a preset in the table of docs/results/demo.md. Raises ValueError without a row."""
    text = (root / "docs" / "results" / "demo.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    row = next((number for number, line in enumerate(lines) if re.match(rf"\| `{name}`[^|]* \|", line)), None)
    if row is None:
        raise ValueError(f"docs/results/demo.md has no row of {name}")
    header = max(number for number in range(row) if lines[number].startswith("|---")) - 1
    return "\n".join([lines[header], lines[header + 1], lines[row]])


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:  # noqa: ANN401
    """Called by MkDocs with the Markdown of each page."""
    from mkdocs.exceptions import PluginError  # tests use this module without MkDocs

    folder, _slash, file = page.file.src_uri.rpartition("/")
    if folder != "attention":
        return markdown
    root = Path(config.config_file_path).parent
    for marker, fill in (("<!-- parts -->", parts), ("<!-- figures -->", figures)):
        if marker in markdown:
            try:
                markdown = markdown.replace(marker, fill(root, file.removesuffix(".md")))
            except ValueError as error:
                raise PluginError(str(error)) from None
    return markdown
