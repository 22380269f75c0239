"""Checkpoints from elsewhere: nothing in them is executed, no memory is taken that they have not got the bytes for, and
what does not fit is told in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fitting import fitted
from hostile import ATTACKS, MARK, WEIGHT_ATTACKS, State

from nmt import Translator
from nmt.config import schema
from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.model.checkpoints import read_checkpoint
from nmt.system.run import load_config, load_values
from nmt.training.job import train

UNFIT = r"is corrupt|is corrupt, or the checkpoint of another model|weights that are infinite|does not fit this run"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conftest import TINY, values_of

    directory = tmp_path_factory.mktemp("honest") / "run"
    values = values_of("train", [*TINY, "training.max_steps=4"])
    config = validated(schema.TrainConfig, values)
    assert train(config, directory, []) == 0
    return directory


@pytest.fixture
def run(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, beside which nothing may appear, and whose end is not evaluated anew."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(honest, tmp_path / "run")
    return tmp_path / "run"


def state_of(path: Path) -> State:
    return read_checkpoint(path)


def refused(call: Callable[[], object], folder: Path, match: str = UNFIT) -> str:
    """The one line of the refusal; nothing was executed, and nothing written outside."""
    with pytest.raises(UserError, match=match) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1000
    assert [path.name for path in folder.iterdir()] == ["run"], MARK
    return message


def resume(run: Path, max_steps: int = 5) -> None:
    config = load_config(run / "config.yaml")
    longer = config.training.model_copy(update={"max_steps": max_steps})
    fitted(config.model_copy(update={"training": longer}), run)


@pytest.mark.filterwarnings("ignore")  # of torch: how the hostile files are made
@pytest.mark.parametrize("attack", WEIGHT_ATTACKS)
def test_a_hostile_checkpoint_is_not_translated_with(attack: str, run: Path) -> None:
    best = run / "checkpoints" / "best.safetensors"
    WEIGHT_ATTACKS[attack](best, state_of(best))
    refused(lambda: Translator.load(run), run.parent)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {"not a number"}))
def test_a_hostile_checkpoint_is_not_resumed(attack: str, run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    ATTACKS[attack](last, state_of(last))
    before = last.read_bytes()
    refused(lambda: resume(run), run.parent)
    assert last.read_bytes() == before


def _optimizer(state: State) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)


def _setter(*path: str | int, value: object) -> Callable[[State], object]:
    def change(state: State) -> None:
        for key in path[:-1]:
            state = state[key]  # type: ignore[index]
        state[path[-1]] = value  # type: ignore[index]

    return change


STATES: dict[str, Callable[[State], object]] = {
    "moments of another size": _optimizer,
    "a negative step": _setter("step", value=-1),
    "a position beyond the epoch": _setter("position", value=10**9),
    "a word for the best score": _setter("stopping", "best", value="high"),
    "a matrix for a sum": _setter("window", 0, value=[{"loss": torch.zeros(3)}]),
    "weights to go on from of another model": lambda state: state.update(updated={"a": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_does_not_fit_is_not_resumed(name: str, run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    state = state_of(last)
    STATES[name](state)
    torch.save(state, last)
    before = {path.name: path.read_bytes() for path in last.parent.iterdir()}
    refused(lambda: resume(run), run.parent)
    assert {path.name: path.read_bytes() for path in last.parent.iterdir()} == before


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder": {"hidden": 2**14}, "decoder": {"hidden": 2**14}},
        {"threads": 10**6},
    ],
    ids=str,
)
def test_a_configuration_takes_no_memory_that_its_checkpoint_has_not(changes: dict[str, Any], run: Path) -> None:
    values = load_values(run / "config.yaml")
    for key, value in changes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    refused(lambda: Translator.load(run), run.parent, "another model|threads=1000000")
