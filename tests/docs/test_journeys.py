"""The two journeys of docs/design.md name the files that execute code, all of them, in the order of the first call."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from conftest import TINY
from documents import ROOT

import nmt
from nmt.training.trainer import Trainer, Update
from nmt.translate.translator import Translator


class Journey:
    """Collects the files of the package that execute code within a `with` statement."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def __enter__(self) -> None:
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _hook(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "nmt"):
            self.files.setdefault(path.relative_to(ROOT / "nmt").as_posix())


def files_of(title: str) -> list[str]:
    """List the files in the first column of the table below a title of docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"`(.+?)`", " ".join(re.findall(r"^\| (`.+?`) \| ", section, re.M)))


def test_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journey, next_update = Journey(), Trainer.next_update

    def followed(trainer: Trainer) -> Update:
        if trainer.step != 2:  # the updates before it fill caches
            return next_update(trainer)
        with journey:
            return next_update(trainer)

    monkeypatch.setattr(Trainer, "next_update", followed)
    nmt.train(*TINY, "training.max_steps=3", directory=tmp_path / "run")
    assert [*journey.files] == files_of("Follow one batch")


def test_one_sentence() -> None:
    translator, journey = Translator.load("demo", device="cpu"), Journey()
    line = ["the old woman sees a small house ."]
    translator.translate(line)
    with journey:
        translator.translate(line)
    assert [*journey.files] == files_of("Follow one sentence")[1:-2]
