"""The ablation: each change is one that the recipe takes and that changes it; interrupted or finished, it goes on."""

import subprocess
from pathlib import Path

import pytest
from conftest import TINY, script, values_of
from forks import call_text

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig

SCRIPT = Path(__file__).parents[1] / "scripts" / "ablation.py"


def ablation(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call_text(SCRIPT, *words, cwd=folder)


@pytest.mark.parametrize("name", script("ablation").CHANGES)
def test_each_change_is_valid_and_changes_the_recipe(name: str) -> None:
    recipe = ["experiment=multi30k_en_de_best"]
    plain, changed = (
        validated(TrainConfig, values_of("train", [*recipe, *more]))
        for more in ([], script("ablation").CHANGES[name].split())
    )
    assert changed != plain


@pytest.mark.slow
@pytest.mark.system
def test_runs_are_compared_and_not_repeated(tmp_path: Path) -> None:
    changes = ["--changes", "no-dropout", "--add", "wide=encoder.hidden=32 decoder.hidden=64"]
    words = ["out", *changes, *TINY, "training.max_steps=3"]
    done = ablation(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("validation: 8 sentences")
    assert (tmp_path / "out" / "comparison" / "index.html").is_file()
    trained = {path.parent.parent.name: path.read_bytes() for path in tmp_path.glob("out/*/1/metrics.jsonl")}
    assert set(trained) == {"recipe", "no-dropout", "wide"}
    assert "hidden=32" in done.stdout
    assert "dropout=0" in done.stdout
    again = ablation(tmp_path, *words)
    assert again.returncode == 0, again.stderr
    assert all((tmp_path / f"out/{name}/1/metrics.jsonl").read_bytes() == before for name, before in trained.items())


def test_mistakes_are_told(tmp_path: Path) -> None:
    for words, told in (
        (["--changes", "no-dropuot"], "no such change: no-dropuot"),
        (["--jobs", "0"], "--seeds and --jobs must be at least 1"),
        (["--seeds", "0"], "--seeds and --jobs must be at least 1"),
        (["--add", "wide"], "--add wide: give it as"),
        (["--add", "wide=encoder.hiden=3"], "encoder.hiden: unknown key; did you mean 'encoder.hidden'?"),
    ):
        done = ablation(tmp_path, "out", "seed=1", *words)
        assert done.returncode == 2
        assert told in done.stderr.splitlines()[-1]
        assert not list(tmp_path.iterdir())


def test_what_changes_nothing_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"none": "decoder.lexical=false", "wide": "encoder.hidden=512", "other": "seed=2"}
    assert list(script("ablation").effective(changes, ["attention=bahdanau", "encoder.hidden=256"])) == [
        "wide",
        "other",
    ]
    assert "none: changes nothing" in capsys.readouterr().err
