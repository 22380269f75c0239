"""Runs and checkpoints from untrusted sources.

Nothing in them is executed, no memory is allocated for bytes that they only claim, and each error is one line.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import tiny_config
from fitting import fitted
from hostile import ATTACKS, MARK, WEIGHT_ATTACKS, State

from nmt import Translator
from nmt.config.errors import UserError
from nmt.data.prepare import prepare
from nmt.data.tokenizer import Tokenizer
from nmt.model.checkpoints import read_checkpoint
from nmt.system.run import load_config, load_values
from nmt.training.job import train

SECRET = "root:x:0:0"
UNFIT = r"is corrupt|is corrupt, or the checkpoint of another model|weights that are infinite|does not fit this run"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("honest") / "run"
    assert train(tiny_config("training.max_steps=4"), directory) == 0
    return directory


@pytest.fixture
def run(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a run into an empty folder, beside a secret file that nothing may read or change."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text(f"{SECRET}\n")
    shutil.copytree(honest, tmp_path / "run")
    return tmp_path / "run"


def refused(call: Callable[[], object], match: str = UNFIT) -> None:
    """Assert a one-line error that does not show the secret, and that nothing was executed or written elsewhere."""
    with pytest.raises(UserError, match=match) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert SECRET not in message
    assert not {path.name for path in Path().iterdir()} - {"run", "outside"}, MARK
    assert [(path.name, path.read_text()) for path in Path("outside").iterdir()] == [("file", f"{SECRET}\n")]


def resume(run: Path, max_steps: int = 5) -> None:
    config = load_config(run / "config.yaml")
    longer = config.training.model_copy(update={"max_steps": max_steps})
    fitted(config.model_copy(update={"training": longer}), run)


@pytest.mark.filterwarnings("ignore")  # torch warns where the test writes hostile files
@pytest.mark.parametrize("attack", WEIGHT_ATTACKS)
def test_a_hostile_checkpoint_is_not_translated_with(attack: str, run: Path) -> None:
    best = run / "checkpoints" / "best.safetensors"
    WEIGHT_ATTACKS[attack](best, read_checkpoint(best))
    refused(lambda: Translator.load(run))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {"not a number"}))
def test_a_hostile_checkpoint_is_not_resumed(attack: str, run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    ATTACKS[attack](last, read_checkpoint(last))
    before = last.read_bytes()
    refused(lambda: resume(run))
    assert last.read_bytes() == before


STATES: dict[str, Callable[[State], object]] = {
    "moments of another size": lambda state: state["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)),
    "a batch beyond the epoch": lambda state: state.update(batch_index=10**9),
    "weights to go on from of another model": lambda state: state.update(updated={"a": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_does_not_fit_is_not_resumed(name: str, run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    state = read_checkpoint(last)
    STATES[name](state)
    torch.save(state, last)
    before = {path.name: path.read_bytes() for path in last.parent.iterdir()}
    refused(lambda: resume(run))
    assert {path.name: path.read_bytes() for path in last.parent.iterdir()} == before


@pytest.mark.parametrize(
    "changes", [{"encoder": {"hidden": 2**14}, "decoder": {"hidden": 2**14}}, {"threads": 10**6}], ids=str
)
def test_a_configuration_takes_no_memory_that_its_checkpoint_has_not(changes: dict[str, Any], run: Path) -> None:
    values = load_values(run / "config.yaml")
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    refused(lambda: Translator.load(run), "another model|threads=1000000")


# Records and tokenizers


@pytest.mark.parametrize("content", ['{"a":' + "[" * 10_000 + "]" * 10_000 + "}", "[]"], ids=["deep nesting", "list"])
def test_a_manifest_that_is_none_is_told(content: str, run: Path) -> None:
    (run / "manifest.json").write_text(content)
    refused(lambda: resume(run), "manifest.json|damaged")


def test_more_bytes_than_a_record_may_have_are_not_read(run: Path) -> None:
    uses = {"manifest.json": resume, "config.yaml": Translator.load, "tokenizer.model": Translator.load}
    for name, use in uses.items():
        kept = (run / name).read_bytes()
        os.truncate(run / name, 2**40)  # a sparse file, which takes no space
        refused(lambda use=use: use(run), "has 1,099,511,627,776 bytes, more than the limit")
        (run / name).write_bytes(kept)


def test_a_tokenizer_that_is_none_or_another_is_told(run: Path) -> None:
    model = (run / "tokenizer.model").read_bytes()
    for junk in (b"", b"junk" * 100, b"\x0a\xff\xff\xff\xff\x0f", model[:100]):
        (run / "tokenizer.model").write_bytes(junk)
        refused(lambda: Translator.load(run), "is not a SentencePiece model|lacks <s>|another model")
        with pytest.raises(UserError, match="SentencePiece"):
            Tokenizer.load(run / "tokenizer.model")
    other = prepare(tiny_config().data, tiny_config("tokenizer.vocab_size=300").tokenizer)
    other.tokenizers.save(run)
    refused(lambda: Translator.load(run), "another model")
