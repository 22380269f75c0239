"""The subpackages of the package, which subpackages each of them may import, and files without import circles."""

import ast
from functools import cache
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


def files() -> list[Path]:
    """List all files but nmt/__init__.py, which names the public API."""
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(typing: bool = True) -> dict[str, set[str]]:
    """Find the modules of nmt that each module imports, also within functions and, if `typing`, for type checking."""
    graph: dict[str, set[str]] = {module_of(path): set() for path in files()}
    for path in files():
        names, tree = set(), ast.parse(path.read_text(encoding="utf-8"))
        if not typing:
            tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING")]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.module, f"{path}: relative import"
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in graph else node.module for name in full}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        graph[module_of(path)] = names & graph.keys() - {module_of(path)}
    return graph


def test_every_file_lies_in_a_subpackage() -> None:
    assert {module.split(".")[1] for module in imported()} == SUBPACKAGES.keys()
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


def test_a_subpackage_imports_only_what_it_may() -> None:
    found = {subpackage: set[str]() for subpackage in SUBPACKAGES}
    for module, others in imported(typing=False).items():
        own = module.split(".")[1]
        found[own] |= {other.split(".")[1] for other in others} - {own}
    assert found == {subpackage: set(others.split()) for subpackage, others in SUBPACKAGES.items()}


def test_the_subpackages_have_no_circle() -> None:
    floors, left = 0, dict(SUBPACKAGES)
    while left:
        floor = [subpackage for subpackage, others in left.items() if not set(others.split()) & left.keys()]
        assert floor, f"a circle among {', '.join(left)}"
        left = {subpackage: others for subpackage, others in left.items() if subpackage not in floor}
        floors += 1
    assert floors <= MAX_FLOORS


def test_no_import_circle_between_files() -> None:
    assert sum(map(len, imported().values())) > 300
    try:
        TopologicalSorter(imported()).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_subpackage_says_where_to_begin() -> None:
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
