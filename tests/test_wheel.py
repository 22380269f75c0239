"""The built wheel, installed where nothing else of the project is, trains from an empty folder."""

import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import TINY

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.system
def test_the_wheel_trains_from_an_empty_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # The dependencies are borrowed from this environment; only `nmt` comes from the wheel.
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    (Path(packages) / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV"))}
    where = subprocess.run(
        [python, "-c", "import nmt; print(nmt.__file__)"],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "venv")
    train = [tmp_path / "venv" / "bin" / "nmt-train", *TINY, "training.max_steps=3"]
    done = subprocess.run(train, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("run: outputs/train/")
