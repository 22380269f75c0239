"""The run directory."""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nmt.config.errors import UserError
from nmt.system.run import RunDirectory, read_json, save_values

SECTIONS: dict[str, object] = {name: {} for name in ("attention", "decoder", "encoder", "tokenizer")}
VALUES = {**SECTIONS, "seed": 1, "optimizer": {"lr": 4}, "training": {"max_steps": 3}}


def test_a_claimed_directory_can_be_claimed_again_by_the_same_run(tmp_path: Path) -> None:
    # The length of a run and the number of workers may change.
    for changes in ({}, {"training": {"max_steps": 9}}, {"data": {"workers": 8}}):
        run = RunDirectory(tmp_path / "run")
        run.claim(VALUES | changes)
        save_values(run.config, VALUES)
        run.results.write_text("{}")
        run.release()
        assert run.config.exists()


def test_a_second_process_is_refused_while_the_first_trains(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.claim(VALUES)
    with pytest.raises(UserError, match=rf"process {os.getpid()} is training there; wait for it or stop it"):
        second.claim(VALUES)
    first.release()
    second.claim(VALUES)
    second.release()


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ({"a.txt": "a", ".lock": "theirs"}, r"is not empty and not a run \(it holds "),
        (
            {"config.yaml": "seed: 1\ntraining: fast\n", "manifest.json": '{"name": "web app"}'},
            r"is not a run \(its config\.yaml is another program's\)",
        ),
    ],
)
def test_nothing_of_a_foreign_directory_is_touched(foreign: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in (foreign | {".film.1.part": "half"}).items():
        (tmp_path / name).write_text(text)
    for use in (RunDirectory(tmp_path).claim, RunDirectory(tmp_path).check):
        with pytest.raises(UserError, match=message):
            use(VALUES)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == foreign | {".film.1.part": "half"}


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    """Even those of the very first write, before there is a configuration."""
    run = RunDirectory(tmp_path)
    for name in (".config.yaml.99.part", "checkpoints/.last.pt.99.part", ".results.json.99.part"):
        run.path.joinpath(name).parent.mkdir(exist_ok=True)
        run.path.joinpath(name).write_text("half")
        run.claim(VALUES)
        assert not [*tmp_path.rglob("*.part")]
        save_values(run.config, VALUES)
        run.release()


def test_another_configuration_names_what_differs(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "last.pt").write_bytes(b"")
    save_values(run.config, VALUES)
    with pytest.raises(UserError, match=r"optimizer\.lr is 4 there, 5 here and 1 more differ"):
        run.claim(VALUES | {"seed": 2, "optimizer": {"lr": 5}})
    with pytest.raises(UserError, match=r"extra is None there, 1 here"):
        run.claim(VALUES | {"extra": 1})


@pytest.mark.parametrize("vanish", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_directory_that_vanishes_is_noticed_and_not_made_again(
    vanish: Callable[[Path], object], tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.claim(VALUES)
    run.check_present()
    vanish(run.path)
    with pytest.raises(UserError, match="was deleted or renamed while the run trained there"):
        run.check_present()
    run.release()
    assert not run.path.exists()


def test_json_is_merged_and_broken_json_is_told(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.update_json(run.results, {"a": 1})
    assert run.update_json(run.results, {"b": "é"}) == {"a": 1, "b": "é"}
    assert json.loads(run.results.read_text()) == {"a": 1, "b": "é"}
    assert read_json(tmp_path / "missing.json") == {}
    run.results.write_text("{")
    with pytest.raises(UserError, match=r"results\.json: cannot be read"):
        read_json(run.results)
    run.results.write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        read_json(run.results)


@pytest.mark.parametrize(
    ("name", "content"), [("target", b"gut\n\xff\n"), ("target", b"gut\n"), ("alignments", b"0-0\n")]
)
def test_damaged_held_out_text_names_the_file(name: str, content: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_held_out("test", ["a", "b"], ["c", "d"], ["0-0", ""])
    assert run.held_out("test") == (["a", "b"], ["c", "d"], ["0-0", ""])
    with pytest.raises(UserError, match=r"split=validation: the corpus of .* has none \(there is: test\)"):
        run.held_out("validation")
    (run.data / f"test.{name}").write_bytes(content)
    problem = "not valid UTF-8 (at byte 4)" if b"\xff" in content else "has 1 line for 2 sentences"
    with pytest.raises(UserError, match=re.escape(f"test.{name}: {problem}")):
        run.held_out("test")


def test_waiting_ends_with_the_lock_or_with_patience(tmp_path: Path) -> None:
    owner, other = RunDirectory(tmp_path), RunDirectory(tmp_path)
    other.wait_until_free(60)  # returns at once: no process trains there
    owner.claim({})
    began = time.monotonic()
    other.wait_until_free(0.3)
    assert 0.3 <= time.monotonic() - began < 10
    release = threading.Timer(0.3, owner.release)
    release.start()
    other.wait_until_free(60)
    assert 0.6 <= time.monotonic() - began < 10
    release.join()
