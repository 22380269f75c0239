"""The published package: its interface and files, pinned dependencies, the container and the wheel."""

import json
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from conftest import TINY

import nmt

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = ("constraints.txt", "docs/constraints.txt")


def test_the_api_is_loaded_on_demand() -> None:
    assert set(nmt.__all__) == {"Comparison", "Run", "Translation", "Translator", "compare_runs", "train"}
    assert nmt.train.__module__ == "nmt.cli.python_api"
    assert nmt.Translator.__module__ == "nmt.translate.translator"
    assert getattr(nmt, "nothing", None) is None


def test_only_what_the_layout_names_stands_at_the_top() -> None:
    allowed = {"nmt", "configs", "docs", "examples", "scripts", "tests"}
    allowed |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}
    allowed |= {"pyproject.toml", "constraints.txt", "Makefile", "Dockerfile", "mkdocs.yml", "CITATION.cff"}
    generated = {"outputs", "dist", "build", "multirun"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - generated <= allowed


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {PROJECT['project']['version']}\n" in (ROOT / "CITATION.cff").read_text()


# Pinned dependencies


def pinned(name: str) -> dict[str, list[str]]:
    """Read a file of constraints: package -> its hashes."""
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())
    parts = [entry.split(" \\\n    ") for entry in entries if not entry.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", package) for package, *_ in parts)
    return {package.partition("==")[0].lower(): hashes for package, *hashes in parts}


def test_each_dependency_is_pinned_once_with_its_hashes() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    own = [name for each in extras["dev"] if each.startswith("nmt-attention[") for name in re.findall(r"\w+", each)[2:]]
    wanted = [*PROJECT["project"]["dependencies"], *(each for name in ("dev", *own) for each in extras[name])]
    names, of_docs = ({re.split(r"[<>=\[]", each)[0].lower() for each in part} for part in (wanted, extras["docs"]))
    ours, docs = map(pinned, PINS)
    assert {"joblib", "optuna", "submitit"} <= names - {"nmt-attention"} <= ours.keys()
    assert of_docs <= docs.keys()
    assert not ours.keys() & docs.keys()
    for package, hashes in {**ours, **docs}.items():
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
        assert bool(hashes) == (package != "torch")


# The Dockerfile, tested without Docker


def instructions() -> list[tuple[str, str]]:
    """Read the Dockerfile's lines as (instruction, arguments), with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines if line.strip()]


def of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_the_container_has_what_the_package_is_built_from_and_runs_as_a_user_without_rights() -> None:
    wheel, project = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"], PROJECT["project"]
    needed = {*wheel["packages"], *wheel["force-include"], *project["license-files"], project["readme"]}
    assert needed | {"pyproject.toml"} <= {source for rest in of("COPY") for source in shlex.split(rest)[:-1]}
    *_, user = of("USER")
    assert user not in {"root", "0"}
    assert any(re.search(rf"useradd\b.* {user}\b", rest) for rest in of("RUN"))
    names = [name for name, _ in instructions()]
    assert "RUN" not in names[names.index("USER") :]


def test_the_container_installs_and_starts_what_the_makefile_does() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,), (recipe,) = of("CMD"), re.findall(r"^train: .*\n\t@\$\(BIN\)/(.*)$", makefile, re.M)
    assert json.loads(command) == recipe.replace(" $(OVERRIDES)", "").split()
    installs = [rest for rest in of("RUN") if "pip install" in rest]
    plain = makefile.replace("$$", "$").replace("$(BIN)/pip", "pip").replace(" --quiet", "")
    for install in installs[:2]:
        assert {"--require-hashes", "--no-deps"} <= set(install.split())
        assert f"\t{install}\n" in plain
    assert installs[2].endswith("\"$(grep '^torch==' constraints.txt)\"")
    assert "--no-deps" in installs[3]


@pytest.mark.slow
@pytest.mark.system
def test_the_wheel_trains_from_an_empty_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python, empty = tmp_path / "venv" / "bin" / "python", tmp_path / "empty"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # The dependencies come from the test's environment, and only nmt from the wheel.
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    (Path(packages) / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    empty.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
    where = [python, "-c", "import nmt; print(nmt.__file__)"]
    train = [python.with_name("nmt-train"), *TINY, "training.max_steps=3"]
    found, done = (
        subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        for command in (where, train)
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("run: outputs/train/")


def test_no_private_module_of_hydra_is_used() -> None:
    root = Path(__file__).parents[1]
    private = re.compile(r"^\s*(from|import) hydra\.(\w+\.)*_\w|setattr\(\W?hydra\.", re.MULTILINE)
    files = [path for folder in ("nmt", "tests", "scripts") for path in (root / folder).rglob("*.py")]
    assert [path.name for path in files if private.search(path.read_text(encoding="utf-8"))] == []
    assert private.search("from hydra._internal.utils import _run_hydra")
