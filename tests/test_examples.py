"""The programs in examples/ do what they say."""

import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
pytestmark = pytest.mark.system


def trained_by_hand(capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[list[float], list[str]]:  # noqa: ANN401
    """Run the example, and return its validation losses and its translations."""
    runpy.run_path(str(EXAMPLES / "train_by_hand.py"))["main"](**settings)
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+) nats", printed)]
    return losses, re.findall(r"-> (.*)", printed)


def test_training_by_hand_learns_from_the_first_epoch_on(capsys: pytest.CaptureFixture[str]) -> None:
    losses, translations = trained_by_hand(capsys, pairs=500, epochs=2)
    assert math.log(800) > losses[0] > losses[1]  # log V is the loss of a uniform guess
    assert len(translations) == 4


@pytest.mark.slow
def test_training_by_hand_learns_to_translate(capsys: pytest.CaptureFixture[str]) -> None:
    losses, translations = trained_by_hand(capsys)
    assert losses[-1] < 0.4
    assert all(line.endswith(" .") for line in translations[-2:])
