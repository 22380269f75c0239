"""nmt-export format=onnx: the program of the documentation translates as nmt-translate does, without nmt and torch."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, values_of
from forks import call

from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.data.demo.corpus import generate
from nmt.export.onnx import PACKAGES, refuse_unfit

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
LINES = ["the cat sees the dog .", "", "the dogs see the red house .", "a", "the small cat sleeps . " * 6]
EXPORTED = ["bahdanau", "luong_dot", "coverage", "multihead", "gaussian_mixture", "none"]


def program(folder: Path) -> Path:
    """The program in the documentation, as a file."""
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^``` python\n(.*?)^```$", text, re.M | re.S)
    assert "nmt" not in re.findall(r"^(?:import|from) (\w+)", block, re.M)
    (folder / "greedy.py").write_text(block, encoding="utf-8")
    return folder / "greedy.py"


def both(folder: Path, lines: list[str]) -> tuple[list[str], list[str]]:
    """Translations by nmt-translate and by the program."""
    text = "".join(f"{line}\n" for line in lines)
    own = call("nmt-translate", "run=run", "search=greedy", stdin=text.encode(), cwd=folder)
    assert own.returncode == 0, own.stderr.decode()
    command = [sys.executable, program(folder), "programs"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return own.stdout.decode().splitlines(), done.stdout.splitlines()


def exported(folder: Path, *values: str) -> None:
    limits = "search.max_length=250"  # that of search=greedy
    corpus = ["data.seed=1", "data.max_length=200"]
    done = call("nmt-train", *TINY, "training.max_steps=6", limits, *corpus, *values, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr.decode()
    done = call("nmt-export", "run=run", "output=programs", "format=onnx", cwd=folder)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "programs: programs\n"


def test_the_documented_program_translates_as_we_do(tmp_path: Path) -> None:
    exported(tmp_path)
    own, other = both(tmp_path, LINES)
    assert other == own
    assert any(own)
    about = json.loads((tmp_path / "programs" / "program.json").read_text())
    files = {about["encoder"]["file"], about["step"]["file"], *about["tokenizers"].values(), "program.json"} - {False}
    assert {path.name for path in (tmp_path / "programs").iterdir()} == files
    again = call("nmt-export", "run=run", "output=programs", "format=onnx", cwd=tmp_path)
    assert again.returncode == 2
    assert b"output=programs: holds programs; name another folder, or set overwrite=true" in again.stderr
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    other_folder = call("nmt-export", "run=run", "output=other", "format=onnx", "overwrite=true", cwd=tmp_path)
    assert b"output=other: holds files other than exported programs" in other_folder.stderr


@pytest.mark.slow
@pytest.mark.parametrize("attention", EXPORTED)
def test_other_attentions_translate_as_we_do(attention: str, tmp_path: Path) -> None:
    exported(tmp_path, f"attention={attention}")
    own, other = both(tmp_path, LINES)
    assert other == own


@pytest.mark.slow
def test_a_thousand_sentences_of_a_trained_model_are_the_same(tmp_path: Path) -> None:
    sizes = ["data.train_size=3000", "tokenizer.vocab_size=1000", "embedding.dim=64", "encoder.hidden=64"]
    sizes += ["decoder.hidden=128", "training.batch_tokens=1024", "training.max_epochs=7", "training.max_steps=450"]
    exported(tmp_path, *sizes, "optimizer.lr=0.005", "schedule.warmup_steps=40")
    lines = [english for english, _, _ in generate(1000, 0, 0, 7).train]
    own, other = both(tmp_path, lines)
    assert len(own) == 1000
    assert len(set(own)) > 400
    assert other == own


REFUSED = {
    "attention=luong_local_m": "attention.window.kind=local_m depends on the number of the step",
    "attention=hard_monotonic": "has another first step than later ones",
    "attention=linear_chain": "attention.normalizer.kind=linear_chain is a loop over the source",
    "attention=mocha": "attention.normalizer.kind=mocha",
    "attention=marginal": "attention.alignment.kind=marginal",
    "attention=variational": "attention.alignment.kind=variational",
    "attention=posterior": "attention.alignment.kind=posterior",
    "encoder/self_attention=attention": "encoder.self_attention",
    "decoder.copy=true": "decoder.copy=true",
}


@pytest.mark.parametrize("choice", REFUSED)
def test_what_cannot_be_exported_is_refused_with_the_reason(choice: str) -> None:
    with pytest.raises(UserError, match=r"^format=onnx: .*; use format=archive$") as error:
        refuse_unfit(validated(schema.TrainConfig, values_of("train", [choice])))
    assert REFUSED[choice] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("nmt.export.onnx.find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(UserError, match=rf"the package {name} is missing: pip install 'nmt\[onnx\]'"):
        refuse_unfit(validated(schema.TrainConfig, values_of("train", [])))


@pytest.mark.parametrize("value", ["license=MIT", "sentence=a", "held_out=true"])
def test_values_for_archives_are_refused(value: str, tmp_path: Path) -> None:
    done = call("nmt-export", "run=run", "output=x", "format=onnx", value, cwd=tmp_path)
    assert done.returncode == 2
    assert b" is for format=archive, which has a model card and text; leave it out" in done.stderr
