"""Evidence of finished runs: packed without text, checked against the runs' records, and compared."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import script, tiny_config

from nmt.training.job import train

WITHOUT_BLEU = ["evaluation.metrics=[ser,wer]", "validation.monitor=ser"]


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loaded = script("evidence")
    monkeypatch.setattr(loaded, "SAMPLES", 100)  # fast
    return loaded


def test_what_is_packed_gives_the_recorded_figures_and_holds_no_text(
    evidence: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, kept = tmp_path / "sweep" / "a", tmp_path / "kept"

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["evidence", *words, str(kept)])
        return evidence.main(), capsys.readouterr().out

    assert train(tiny_config("training.max_steps=3"), run, ["attention=bahdanau"]) == 0
    status, printed = call("pack", str(run.parent))
    assert status == 0
    assert "1 runs checked, 0 scores differ" in printed
    (file,) = kept.glob("*.npz")
    with np.load(file, allow_pickle=False) as arrays:
        values = dict(arrays)
    record = json.loads(values["record"].tobytes())
    recorded = json.loads((run / "results.json").read_text())["test"]
    assert record["results"]["test"]["bleu"] == recorded["bleu"]
    targets = (run / "data" / "test.target").read_text().splitlines()
    assert values["test/bleu"].shape == (10, len(targets))
    assert not any(line in json.dumps(record, ensure_ascii=False) for line in targets)

    nested = tmp_path / "study"
    for name in ("one", "two"):
        shutil.copytree(run, nested / name / "1")
    evidence.pack(nested, tmp_path / "both")
    assert "2 runs checked, 0 scores differ" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"one_1.npz", "two_1.npz"}

    assert call("table")[0] == 0
    comparison = kept / "comparison" / "comparison.json"
    (system,) = json.loads(comparison.read_text())["comparisons"][0]["systems"]
    assert system["chrf"] == pytest.approx(recorded["chrf"], abs=1e-4)
    assert system["aer"] == pytest.approx(100 * recorded["aer"])
    assert system["update_milliseconds"] > 0
    assert call("check") == (0, f"1 runs checked, 0 scores differ\n{comparison.parent}: 0 figures differ\n")

    speed = {"attention": "bahdanau", "milliseconds_an_update": 123.0, "sentences_per_second": 45.0}
    benchmark = {"machine": {"name": "a quiet machine", "threads": 1}, "presets": [speed]}
    (kept / "benchmark.json").write_text(json.dumps(benchmark))
    assert call("check")[0] == 1  # the comparison has the run's own speeds
    assert call("table")[0] == 0
    timed = json.loads(comparison.read_text())["comparisons"][0]
    assert timed["machines"] == ["a quiet machine, threads=1"]
    assert timed["systems"][0]["update_milliseconds"] == 123
    assert timed["systems"][0]["cost_seconds"] == pytest.approx(3 * 0.123)
    assert timed["systems"][0]["sentences_per_second"] == 45
    assert call("check")[0] == 0
    for presets in ([], [{"attention": "bahdanau", "milliseconds_an_update": 123.0}]):
        (kept / "benchmark.json").write_text(json.dumps({**benchmark, "presets": presets}))
        assert call("table")[0] == 2
    (kept / "benchmark.json").unlink()
    call("table")

    comparison.write_text(comparison.read_text().replace(f'"chrf": {system["chrf"]}', '"chrf": 99.0', 1))
    status, printed = call("check")
    assert status == 1
    assert f"systems[0].chrf is 99.0, the runs give {system['chrf']}" in printed
    values["test/chrf"][2] += 1  # changes a count of matches
    np.savez(file, **values)
    assert "test chrf is" in call("check")[1]


def test_runs_are_compared_on_one_test_set_and_the_best_is_tested_in_all_pairs(
    evidence: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep, kept = tmp_path / "sweep", tmp_path / "kept"
    for name in ("bahdanau", "luong_dot", "none"):
        config = tiny_config("training.max_steps=2", f"attention={name}", *WITHOUT_BLEU)
        assert train(config, sweep / name, [f"attention={name}"]) == 0
    for words in (("pack", str(sweep), str(kept)), ("table", str(kept)), ("check", str(kept))):
        monkeypatch.setattr(sys, "argv", ["evidence", *words])
        assert evidence.main() == 0, capsys.readouterr().out
    with np.load(kept / "none.npz", allow_pickle=False) as arrays:
        values = dict(arrays)
    values["test/words"][2] += 1
    np.savez(kept / "none.npz", **values)
    monkeypatch.setattr(sys, "argv", ["evidence", "table", str(kept)])
    assert evidence.main() == 2
    assert "bahdanau and none: the held-out sets differ: line 3 of the sources" in capsys.readouterr().err
