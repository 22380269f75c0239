"""Evidence of finished runs: packed without text, and checked against the scores that the runs recorded."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import script

from nmt.config.schema import TrainConfig
from nmt.training.job import train


def test_what_is_packed_gives_the_recorded_scores_and_holds_no_text(
    train_config: Callable[..., TrainConfig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evidence, run = script("evidence"), tmp_path / "sweep" / "a"
    assert train(train_config("training.max_steps=3"), run, []) == 0
    monkeypatch.setattr(sys, "argv", ["evidence", "pack", str(run.parent), str(tmp_path / "kept")])
    assert evidence.main() == 0
    assert "1 runs checked, 0 scores differ" in capsys.readouterr().out
    (file,) = (tmp_path / "kept").glob("*.npz")
    with np.load(file, allow_pickle=False) as arrays:
        values = dict(arrays)
    record = json.loads(values["record"].tobytes())
    assert record["results"]["test"]["bleu"] == json.loads((run / "results.json").read_text())["test"]["bleu"]
    targets = (run / "data" / "test.target").read_text().splitlines()
    assert values["test/bleu"].shape == (10, len(targets))
    assert not any(line in json.dumps(record, ensure_ascii=False) for line in targets)
    values["test/chrf"][2] += 1  # matches
    np.savez(file, **values)
    monkeypatch.setattr(sys, "argv", ["evidence", "check", str(tmp_path / "kept")])
    assert evidence.main() == 1
    assert "test chrf is" in capsys.readouterr().out
