"""The subpackages of the package, which subpackages each of them may import, and files without import circles."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import nmt

SUBPACKAGES: dict[str, str] = {  # subpackage -> subpackages that it may import
    "cli": "config system data translate evaluate training compare serve export",
    "config": "",
    "system": "config",
    "data": "config system",
    "ops": "config system",
    "attention": "ops",
    "model": "config system data ops attention",
    "training": "config system data ops attention model translate evaluate explain",
    "translate": "config system data ops attention model",
    "evaluate": "config system data translate",
    "explain": "config data attention model translate",
    "compare": "config system data translate evaluate",
    "serve": "config system attention translate evaluate explain",
    "export": "config system data model translate evaluate",
}
MAX_FLOORS = 11
PACKAGE = Path(nmt.__file__).parent


def imports(path: Path) -> set[str]:
    """Find the subpackages that a file imports, also within functions, but not those for type checking only."""
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
    return {name.split(".")[1] for name in names if name.startswith("nmt.")} - {
        "DISTRIBUTION"
    }  # a constant in nmt/__init__.py


def subpackage_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_every_file_lies_in_a_subpackage() -> None:
    assert {subpackage_of(path) for path in files()} == SUBPACKAGES.keys()
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


def test_a_subpackage_imports_only_what_it_may() -> None:
    imported = {subpackage: set[str]() for subpackage in SUBPACKAGES}
    for path in files():
        imported[subpackage_of(path)] |= imports(path) - {subpackage_of(path)}
    assert imported == {subpackage: set(others.split()) for subpackage, others in SUBPACKAGES.items()}


def test_the_subpackages_have_no_circle() -> None:
    floors, left = 0, dict(SUBPACKAGES)
    while left:
        floor = [subpackage for subpackage, others in left.items() if not set(others.split()) & left.keys()]
        assert floor, f"a circle among {', '.join(left)}"
        left = {subpackage: others for subpackage, others in left.items() if subpackage not in floor}
        floors += 1
    assert floors <= MAX_FLOORS


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path, modules: set[str]) -> set[str]:
    """Find the modules of nmt that a file imports, also within functions and for type checking only."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {alias: f"{node.module}.{alias}" for alias in (alias.name for alias in node.names)}
            names |= {name if name in modules else node.module for name in full.values()}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & modules


def test_no_import_circle_between_files() -> None:
    by_module = {module_of(path): path for path in files()}  # without nmt/__init__.py, which names the public API
    graph = {module: imported_files(path, {*by_module}) - {module} for module, path in by_module.items()}
    assert sum(map(len, graph.values())) > 300
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_room_says_where_to_begin() -> None:
    for subpackage in SUBPACKAGES:
        text = ast.get_docstring(ast.parse((PACKAGE / subpackage / "__init__.py").read_text(encoding="utf-8")))
        assert text is not None
        assert "Begin with" in text
        for name in {part for part in text.split("`") if part.endswith((".py", "/")) and "configs" not in part}:
            assert (PACKAGE / subpackage / name).exists(), f"{subpackage}: {name}"


def test_only_preparation_imports_datasets() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import) and any(alias.name == "datasets" for alias in node.names)
    }
    assert users == {"data/text.py"}


def test_files_stay_readable() -> None:
    long = {str(path.relative_to(PACKAGE)): n for path in files() if (n := len(path.read_text().splitlines())) > 700}
    assert long == {}
