"""Give the site the pages that lie at the top of the project: CONTRIBUTING.md and CHANGELOG.md.

Links lead to where the files lie on disk; here they become links between the site's pages, and back.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:  # noqa: ANN401
    """Add the pages; MkDocs calls this once it knows all files."""
    root = Path(config.config_file_path).parent
    for name, source in PAGES.items():
        text = (root / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links to the files at the top to their pages; MkDocs calls this with the Markdown of each page."""
    for name, source in PAGES.items():
        markdown = markdown.replace(f"../{source}", name)
    return markdown
