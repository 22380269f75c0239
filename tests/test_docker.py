"""The Dockerfile, read and tried without Docker."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of each line, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines if line.strip()]


def of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_all_that_the_package_is_built_from_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"}
    needed |= set(project["project"]["license-files"])
    assert needed <= {source for rest in of("COPY") for source in shlex.split(rest)[:-1]}


def test_it_runs_as_a_user_without_rights() -> None:
    *_, user = of("USER")
    assert user not in {"root", "0"}
    assert any(re.search(rf"useradd\b.* {user}\b", rest) for rest in of("RUN"))
    names = [name for name, _ in instructions()]
    assert "RUN" not in names[names.index("USER") :]


def test_its_command_is_one_of_the_package() -> None:
    (command,) = of("CMD")
    name, *arguments = json.loads(command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert name in project["scripts"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^train: .*\n\t@\$\(BIN\)/(.*)$", makefile, re.M)
    assert [name, *arguments] == recipe.replace(" $(OVERRIDES)", "").split()


def test_packages_are_those_of_the_makefile_pinned_and_hashed() -> None:
    installs = [rest for rest in of("RUN") if "pip install" in rest]
    for install in installs[:2]:
        assert "constraints.txt" in install
        assert "--require-hashes" in install
        assert "--no-deps" in install
    assert installs[2].endswith("\"$(grep '^torch==' constraints.txt)\"")
    assert "--no-deps" in installs[3]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$$", "$").replace("$(BIN)/pip", "pip")
    makefile = makefile.replace(" --quiet", "")
    for install in installs[:2]:
        assert f"\t{install}\n" in makefile


@pytest.mark.slow
def test_its_installations_resolve(tmp_path: Path) -> None:
    """In an empty environment, without writing to it. torch's own index is left out: its versions are those of PyPI."""
    venv.create(tmp_path / "venv", with_pip=True)
    for install in (rest for rest in of("RUN") if "pip install" in rest):
        command = install.partition(" && pip check")[0].replace('--index-url "${TORCH_INDEX}" ', "")
        if "--no-build-isolation ." in command:
            continue  # needs what the steps before would have installed
        command = command.replace("pip install", f"{tmp_path}/venv/bin/pip install --dry-run --no-deps")
        command = command.replace("--no-build-isolation", "")
        done = subprocess.run(["bash", "-ceu", command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Would install" in done.stdout
    assert sys.version_info >= (3, 11)
