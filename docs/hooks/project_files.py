"""Give the site the pages at the top of the project, CONTRIBUTING.md and CHANGELOG.md, and the project's address.

Links lead to where the files lie on disk; here they become links between the site's pages, and back.
"""

import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_config(config: Any) -> Any:  # noqa: ANN401
    """Link every page to the project's address in pyproject.toml; MkDocs calls this first."""
    text = (Path(config.config_file_path).parent / "pyproject.toml").read_text(encoding="utf-8")
    config.repo_url = tomllib.loads(text)["project"]["urls"]["Repository"]
    config.repo_name = "Source code"
    return config


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
