"""Sentence statistics are kept beside an output, and used only for the texts and metrics that they belong to."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nmt.evaluate import stored
from nmt.evaluate.bleu import METRICS, ScoreSettings, count
from nmt.evaluate.stored import stored_counts

HYPOTHESES, REFERENCES = ["a b c d", "e f"], ["a b c e", "e f g"]
PLAIN = ScoreSettings("13a", False)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of hypotheses of each real count."""
    calls: list[int] = []

    def counting(hypotheses: list[str], references: list[str], settings: ScoreSettings) -> object:
        if hypotheses != [""]:  # which asks for the signatures alone
            calls.append(len(hypotheses))
        return count(hypotheses, references, settings)

    monkeypatch.setattr(stored, "count", counting)
    return calls


def test_an_output_is_counted_once(tmp_path: Path, counted: list[int]) -> None:
    path = tmp_path / "test.statistics.safetensors"
    expected = count(HYPOTHESES, REFERENCES, PLAIN)
    for _ in range(2):
        found = stored_counts(path, HYPOTHESES, REFERENCES, PLAIN)
        assert found.signatures == expected.signatures
        assert all(np.array_equal(found.counts[name], expected.counts[name]) for name in METRICS)
    assert counted == [2]


def test_other_texts_and_metrics_are_counted_again(tmp_path: Path, counted: list[int]) -> None:
    path = tmp_path / "test.statistics.safetensors"
    stored_counts(path, HYPOTHESES, REFERENCES, PLAIN)
    for changed in (
        (["a b c d", "e g"], REFERENCES, PLAIN),
        (HYPOTHESES, ["a b c e", "e f h"], PLAIN),
        (HYPOTHESES, REFERENCES, ScoreSettings("13a", True)),
    ):
        before = len(counted)
        found = stored_counts(path, *changed)
        assert all(np.array_equal(found.counts[name], count(*changed).counts[name]) for name in METRICS)
        assert len(counted) == before + 1


@pytest.mark.parametrize("damage", ["cut", "negative", "float", "shape", "absent", "folder"])
def test_a_damaged_file_is_counted_again(damage: str, tmp_path: Path, counted: list[int]) -> None:
    path = tmp_path / "test.statistics.safetensors"
    expected = stored_counts(path, HYPOTHESES, REFERENCES, PLAIN)
    arrays = load_file(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        changed = {
            "negative": lambda: arrays | {"ter": arrays["ter"] - 9},
            "float": lambda: arrays | {"ter": arrays["ter"] * 0.5},
            "shape": lambda: arrays | {"ter": arrays["ter"][:1]},
            "absent": lambda: {name: rows for name, rows in arrays.items() if name != "ter"},
        }
        save_file(changed[damage](), path)
    found = stored_counts(path, HYPOTHESES, REFERENCES, PLAIN)
    assert counted == [2, 2]
    assert all(np.array_equal(found.counts[name], expected.counts[name]) for name in METRICS)


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path: Path, counted: list[int]) -> None:
    (tmp_path / "file").write_text("")
    found = stored_counts(tmp_path / "file" / "test.statistics.safetensors", HYPOTHESES, REFERENCES, PLAIN)
    assert found.scores() == count(HYPOTHESES, REFERENCES, PLAIN).scores()
