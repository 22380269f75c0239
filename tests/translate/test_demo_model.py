"""The model that comes with the package: run=demo."""

from pathlib import Path

import pytest

from nmt import Translator
from nmt.system.run import DEMO, RunDirectory

SOURCE = "the small dogs see the red house ."


def test_it_translates_and_aligns() -> None:
    translation = Translator.load("demo", device="cpu", precision="fp32").translate([SOURCE])[0]
    assert translation.text == "les petits chiens voient la maison rouge ."
    assert translation.alignment is not None
    # For each source token, the target token that gives it the largest weight.
    rows = [translation.tokens[int(row)] for row in translation.alignment.argmax(0)]
    by_source = dict(zip(translation.source_tokens, rows, strict=True))
    assert "rouge" in by_source["▁red"]
    assert "maison" in by_source["▁house"]


def test_it_is_small_and_says_what_it_is_and_a_run_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEMO.stat().st_size < 3_500_000
    run = RunDirectory.existing("demo")
    assert run.is_archive
    assert "demo" in (run.path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.existing("demo").path.resolve() == (tmp_path / "demo").resolve()
