"""What the package promises about itself."""

import re
import tomllib
from pathlib import Path

import nmt

ROOT = Path(__file__).resolve().parent.parent


def test_the_api_is_loaded_on_demand() -> None:
    assert set(nmt.__all__) == {"Comparison", "Run", "Translation", "Translator", "compare_runs", "train"}
    assert nmt.train.__module__ == "nmt.cli.python"
    assert nmt.Translator.__module__ == "nmt.translate.translator"
    assert getattr(nmt, "nothing", None) is None


def test_every_pin_lies_in_its_range() -> None:
    """constraints.txt pins each dependency that pyproject.toml gives a range for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = [name for each in extras["dev"] if each.startswith("nmt-attention[") for name in re.findall(r"\w+", each)[2:]]
    wanted = [*project["dependencies"], *(each for name in ("dev", *own) for each in extras[name])]
    names = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in wanted} - {"nmt-attention"}
    assert {"joblib", "optuna", "submitit"} <= names
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert names <= pinned
    of_docs = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in extras["docs"]}
    pinned = {line.split("==")[0].lower() for line in (ROOT / "docs" / "constraints.txt").read_text().splitlines()}
    assert of_docs <= pinned


def test_only_what_the_layout_names_stands_at_the_top() -> None:
    allowed = {
        "pyproject.toml",
        "README.md",
        "Makefile",
        "Dockerfile",
        ".dockerignore",
        "nmt",
        "configs",
        "docs",
        "mkdocs.yml",
        "scripts",
        "tests",
    }
    allowed |= {"LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "constraints.txt"}
    generated = {"outputs", "dist", "build", "multirun"}
    top = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert top - generated <= allowed


def test_the_citation_names_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
