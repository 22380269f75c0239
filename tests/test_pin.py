"""constraints.txt: exact versions, and the hashes by which an installation refuses any other file."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/constraints.txt"


@pytest.fixture
def pin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pin", ROOT / "scripts" / "pin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins_of(name: str) -> list[str]:
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())
    return [entry for entry in entries if not entry.startswith("#")]


def test_no_version_is_pinned_twice() -> None:
    first, second = ({entry.split("==")[0] for entry in pins_of(name)} for name in ("constraints.txt", DOCS))
    assert not first & second


@pytest.mark.parametrize(("name", "least"), [("constraints.txt", 90), (DOCS, 15)])
def test_each_version_has_the_hashes_of_its_files_but_for_torch(name: str, least: int) -> None:
    pins = pins_of(name)
    assert len(pins) > least
    for entry in pins:
        package, *hashes = entry.split(" \\\n    ")
        assert re.fullmatch(r"[\w.-]+==[\w.]+", package)
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
        assert bool(hashes) == (not package.startswith("torch=="))


REQUIRES = {
    "mkdocs": ["shared>=1", "only-docs", 'windows; sys_platform == "win32"', 'extra-part; extra == "i18n"'],
    "mkdocstrings": ['handler>=1; extra == "python"', 'other; extra == "crystal"'],
    "torch": ["shared"],
}


def test_what_the_documentation_needs_is_kept_apart(pin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        return REQUIRES.get(name, [])

    monkeypatch.setattr(pin, "requires", requires)
    needed = pin.docs_only()
    assert needed >= {"mkdocs", "only-docs", "mkdocstrings", "handler"}
    assert not needed & {"shared", "windows", "extra-part", "other", "torch"}
