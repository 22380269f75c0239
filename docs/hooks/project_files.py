"""Pages and pictures that lie elsewhere in the project: CONTRIBUTING.md, CHANGELOG.md and README's picture."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
PICTURES = {"images/alignment.png": ".github/images/alignment.png"}


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401
    """Called by MkDocs once all files are known."""
    root = Path(config.config_file_path).parent
    for name, source in PAGES.items():
        text = (root / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    for name, source in PICTURES.items():
        files.append(File.generated(config, name, content=(root / source).read_bytes()))
    return files
