"""COMET scores, with a stand-in for the package unbabel-comet."""

from pathlib import Path

import pytest
import torch

from nmt.config.errors import UserError
from nmt.evaluate import evaluation
from nmt.evaluate.evaluation import Comet

HUB = "Unbabel/wmt22-comet-da"
CPU = torch.device("cpu")


def test_scores_are_in_the_order_of_the_sentences(comet_package: Path) -> None:
    sources = [f"{'w ' * (n * 7 % 40)}x" for n in range(40)]  # different lengths, so that batches reorder them
    references = [f"a b c {n}" for n in range(40)]
    hypotheses = [line if n % 3 else f"{line} d" for n, line in enumerate(references)]
    done: list[int] = []
    scores = Comet(HUB, "key", CPU)(sources, hypotheses, references, done.append)
    assert scores == pytest.approx([1.0 if n % 3 else 0.8 for n in range(40)])
    assert sum(done) == 40


def test_a_checkpoint_is_a_file_and_a_name_is_of_the_hub(comet_package: Path, tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_text("comet")
    assert Comet(str(tmp_path / "model.ckpt"), "key", CPU)(["s"], ["a"], ["a"]) == [1.0]
    (tmp_path / "damaged.ckpt").write_text("no")
    for name, message in {
        str(tmp_path / "damaged.ckpt"): r"cannot be loaded \(PytorchStreamReader failed\); is it the file of a COMET",
        "Unbabel/absent": r"key=Unbabel/absent: .*\(.*not supported by COMET.*\); check the name and the network",
    }.items():
        with pytest.raises(UserError, match=message) as caught:
            Comet(name, "key", CPU)
        assert "\n" not in str(caught.value)


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=f"key={HUB}: COMET needs another package: pip install unbabel-comet"):
        Comet(HUB, "key", CPU)
