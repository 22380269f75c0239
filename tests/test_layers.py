"""The rooms of the package, and which rooms each of them may import."""

import ast
from pathlib import Path

import nmt

ROOMS: dict[str, str] = {  # room -> rooms that it may import
    "cli": "config system data translate evaluate training compare serve export",
    "config": "",
    "system": "config",
    "data": "config system",
    "ops": "config system",
    "attention": "ops",
    "model": "config system data ops attention",
    "training": "config system data ops attention model translate evaluate explain",
    "translate": "config system data ops attention model",
    "evaluate": "config system data translate explain",
    "explain": "config system data attention model translate",
    "compare": "config system data translate evaluate explain",
    "serve": "config system attention translate explain",
    "export": "config system data model translate",
}
MAX_FLOORS = 11
PACKAGE = Path(nmt.__file__).parent


def imports(path: Path) -> set[str]:
    """Find the rooms that a file imports, also within functions, but not those for type checking only."""
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


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_every_file_lies_in_a_room() -> None:
    assert {room_of(path) for path in files()} == ROOMS.keys()
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


def test_a_room_imports_only_what_it_may() -> None:
    imported = {room: set[str]() for room in ROOMS}
    for path in files():
        imported[room_of(path)] |= imports(path) - {room_of(path)}
    assert imported == {room: set(others.split()) for room, others in ROOMS.items()}


def test_the_rooms_have_no_circle() -> None:
    floors, left = 0, dict(ROOMS)
    while left:
        floor = [room for room, others in left.items() if not set(others.split()) & left.keys()]
        assert floor, f"a circle among {', '.join(left)}"
        left = {room: others for room, others in left.items() if room not in floor}
        floors += 1
    assert floors <= MAX_FLOORS


def test_every_room_says_where_to_begin() -> None:
    for room in ROOMS:
        text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")))
        assert text is not None
        assert "Begin with" in text
        for name in {part for part in text.split("`") if part.endswith((".py", "/")) and "configs" not in part}:
            assert (PACKAGE / room / name).exists(), f"{room}: {name}"


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
