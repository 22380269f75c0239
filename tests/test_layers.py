"""The package's layers: each part imports only what stands below it."""

import ast
from pathlib import Path

import nmt

LAYERS = [  # from the top down
    "cli",
    "serve",
    "comparison",
    "export",
    "training",
    "objectives",
    "evaluation",
    "directions",
    "faithfulness",
    "explanation",
    "saliency",
    "translator",
    "translation",
    "terminology",
    "searcher",
    "search_choice",
    "shortlist",
    "guidance",
    "model",
    "attention",
    "ops",
    "run",
    "environment",
    "archive",
    "data",
    "distributed",
    "contention",
    "machine",
    "report",
    "search",
    "metrics",
    "processes",
    "config",
    "files",
]
PACKAGE = Path(nmt.__file__).parent


def imports(path: Path) -> set[str]:
    """Parts of nmt that a file imports, also inside functions, but for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return {name.split(".")[1] for name in names if name.startswith("nmt.")}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_every_file_belongs_to_a_layer() -> None:
    assert {part_of(path) for path in files()} == set(LAYERS)


def test_nothing_imports_upward() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports nmt.{name}"
        for path in files()
        for name in imports(path)
        if LAYERS.index(name) < LAYERS.index(part_of(path))
    ]
    assert upward == []


def test_search_and_metrics_and_config_know_nobody() -> None:
    foreign = [
        (path.name, name)
        for path in files()
        if part_of(path) in {"search", "metrics", "config"}
        for name in imports(path) - {part_of(path), "files"}
    ]
    assert foreign == []


def test_only_preparation_imports_datasets() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import) and any(alias.name == "datasets" for alias in node.names)
    }
    assert users == {"data/reading.py"}


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(PACKAGE)): n for path in files() if (n := len(path.read_text().splitlines())) > 700}
    assert long == {}
