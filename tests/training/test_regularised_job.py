"""A run with all that regularises: all it draws follows from the seed and the update."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY, values_of

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.training.job import train

EVERYTHING = [
    "attention=nematus",
    "decoder=lstm",
    "decoder.input_feeding=true",
    "variational_dropout=true",
    "embedding.word_dropout=0.1",
    *(
        f"{side}.{option}"
        for side in ("encoder", "decoder")
        for option in (
            "layers=2",
            "residual=true",
            "layer_norm=true",
            "zoneout=0.1",
            "recurrent_dropout=0.1",
            "weight_drop=0.1",
            "transition_depth=1",
        )
    ),
    "training.max_steps=10",
    "training.log_every=2",
    "validation.unit=steps",
    "validation.every=4",
]
KILLED_AT = 7  # between two checkpoints
KILLED = f"""
import os, signal
from nmt.training.step import Updater
original, calls = Updater.__call__, []
def update(*given):
    calls.append(1)
    if len(calls) == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*given)
Updater.__call__ = update
from nmt.cli.train import main
main()
"""


@pytest.mark.slow
@pytest.mark.system
def test_killed_and_resumed_it_ends_in_the_same_bits(tmp_path: Path) -> None:
    config = validated(TrainConfig, values_of("train", [*TINY, *EVERYTHING]))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(config, whole, []) == 0
    command = [sys.executable, "-c", KILLED, *TINY, *EVERYTHING, f"hydra.run.dir={killed}"]
    assert subprocess.run(command, capture_output=True, timeout=240, check=False).returncode == -signal.SIGKILL
    assert train(config, killed, []) == 0
    states = [torch.load(run / "checkpoints" / "last.pt", weights_only=True) for run in (whole, killed)]
    assert states[0]["step"] == states[1]["step"] == 10
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    scores = [json.loads((run / "results.json").read_text())["test"]["bleu"] for run in (whole, killed)]
    assert scores[0] == scores[1]
    assert len(json.loads((killed / "manifest.json").read_text())["starts"]) == 2
