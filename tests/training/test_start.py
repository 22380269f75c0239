"""Fine-tuning: a run that starts from another one's weights."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, values_of

from nmt.config.compose import validated
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.model.checkpoints import FILES, read_checkpoint
from nmt.system.run import RunDirectory
from nmt.training import checkpoint
from nmt.training.job import train
from nmt.training.step import Update, Updater

Config = Callable[..., TrainConfig]
SHORT = ["training.max_steps=3", "validation.unit=steps", "validation.every=2"]
STILL = ["optimizer.lr=1e-12", "schedule=constant"]
OTHER_DATA = "data.seed=7"


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = read_checkpoint(run / "checkpoints" / FILES[name])["model"]
    return loaded


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("first")
    assert train(validated(TrainConfig, values_of("train", [*TINY, *SHORT])), run, []) == 0
    return run


def tokenizer_of(run: Path) -> list[str]:
    return ["tokenizer=file", f"tokenizer.source_model={run}/tokenizer.model"]


def test_its_first_weights_are_the_best_of_the_other_run(first: Path, train_config: Config, tmp_path: Path) -> None:
    tiny = [override for override in TINY if not override.startswith("tokenizer.")]
    overrides = [*tiny, *SHORT, *STILL, OTHER_DATA, *tokenizer_of(first), f"training.start_from={first}"]
    assert train(validated(TrainConfig, values_of("train", overrides)), tmp_path / "tuned", []) == 0
    tuned, best = weights(tmp_path / "tuned", "last"), weights(first, "best")
    assert all(torch.allclose(tuned[name], best[name], atol=1e-9) for name in best | tuned)
    assert train(train_config(*SHORT, *STILL), tmp_path / "fresh", []) == 0
    fresh = weights(tmp_path / "fresh", "last")
    assert not any(torch.allclose(fresh[name], best[name]) for name in ("output.weight", "encoder.rnn.weight_hh_l0"))
    (start,) = json.loads((tmp_path / "tuned" / "manifest.json").read_text())["starts"]
    assert start["start_from"]["run"] == str(first)
    assert start["start_from"]["system"] == RunDirectory(first).system_digest()
    assert start["start_from"]["step"] == read_checkpoint(first / "checkpoints" / "best.safetensors")["step"]


def test_once_it_has_a_checkpoint_it_needs_the_other_run_no_more(
    first: Path, train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = shutil.copytree(first, tmp_path / "gone")
    config = train_config(*SHORT, f"training.start_from={gone}")
    assert train(config, tmp_path / "whole", []) == 0
    real = Updater.__call__
    calls = []

    def interrupted(self: Updater, *args: Any) -> Update:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args)

    monkeypatch.setattr(Updater, "__call__", interrupted)
    assert train(config, tmp_path / "stopped", []) == 128 + signal.SIGTERM
    shutil.rmtree(gone)
    assert train(config, tmp_path / "stopped", []) == 0
    ends = [weights(tmp_path / name, "last") for name in ("whole", "stopped")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0] | ends[1])


def test_what_it_starts_from_stays_the_best_until_there_is_a_better_one(
    first: Path, train_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = ["optimizer.lr=1", "schedule=constant", "validation.monitor=loss"]
    config = train_config(*SHORT, f"training.start_from={first}", *worse)
    real = Updater.__call__
    calls = []

    def killed(self: Updater, *args: Any) -> Update:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Updater, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", [])
    assert (
        checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["logged_step"] == 0
    )  # which it need not tell again
    assert train(config, tmp_path / "run", []) == 0
    best, started = weights(tmp_path / "run", "best"), weights(first, "best")
    assert all(torch.equal(best[name], started[name]) for name in best | started)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validated = [(line["step"], line["validation/loss"]) for line in lines if "validation/loss" in line]
    assert [step for step, _ in validated] == [0, 2, 3]
    assert validated[1][1] > validated[0][1] + 1


def test_the_saved_path_is_absolute(train_config: Config) -> None:
    settled = train_config("training.start_from=here/it/is").with_absolute_paths()
    assert settled.training.start_from == str(Path.cwd() / "here" / "it" / "is")
    assert train_config("data.extra=[a,/b]").with_absolute_paths().data.extra == [str(Path.cwd() / "a"), "/b"]
    assert train_config().with_absolute_paths().training.start_from is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder.hidden=8"], r"do not fit this model \(encoder.hidden is 16 there, 8 here\)"),
        (
            ["decoder.attend=after", "encoder.cell=lstm"],
            "encoder.cell is gru there, lstm here; decoder.attend is before",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run_begins(
    overrides: list[str], message: str, first: Path, train_config: Config, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message.format(run=first)) as error:
        train(train_config(*SHORT, *overrides, f"training.start_from={first}"), tmp_path / "run", [])
    assert str(error.value).startswith(f"training.start_from={first}: ")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "run").iterdir())


def test_a_run_without_weights_or_no_run_is_refused(first: Path, train_config: Config, tmp_path: Path) -> None:
    young = shutil.copytree(first, tmp_path / "young")
    shutil.rmtree(young / "checkpoints")
    with pytest.raises(
        UserError, match=r"best\.safetensors: no such checkpoint; has the run reached its first validation"
    ):
        train(train_config(f"training.start_from={young}"), tmp_path / "run", [])
    with pytest.raises(UserError, match=r"training\.start_from=nowhere: no such directory"):
        train(train_config("training.start_from=nowhere"), tmp_path / "run", [])
