"""Reading of runs and of other systems' outputs for a comparison, and errors."""

import gzip
import json
import os
import re
from pathlib import Path

import pytest
from made_runs import REFERENCES, SOURCES, make_run, worsened, write

from nmt.compare.entry import HeldOut, Training, Validation, find_runs, read_run, read_systems
from nmt.config.errors import UserError
from nmt.evaluate.metrics import ScoreSettings

PLAIN = ScoreSettings("13a", False)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_tells_all_that_is_known_of_it() -> None:
    make_run(Path("a"), worsened(3), "attention=luong_dot", "seed=7", "device=cpu")
    entry, test_set = read_run(Path("a"), "test")
    assert (test_set.sources, test_set.references, test_set.settings) == (SOURCES, REFERENCES, PLAIN)
    assert (entry.name, entry.hypotheses, entry.seed) == ("a", worsened(3), 7)
    assert entry.choices == {"attention": "luong_dot"}  # the preset may have chosen the encoder
    make_run(Path("b"), worsened(3), "attention=luong_dot", "encoder=gru")
    assert read_run(Path("b"), "test")[0].choices == {"attention": "luong_dot", "encoder": "gru"}
    assert entry.aer == pytest.approx(50.0)  # one of two links is right
    assert (entry.parameters, entry.sentences_per_second) == (1234, 50.0)
    curve = [Validation(10, 1.0, {"bleu": 10.0}, 8.0), Validation(20, 2.0, {"bleu": 20.0}, 7.0)]
    machine = "a CPU, fp32, threads=1"
    assert entry.training == Training(60.0, 20, 3000 / 1500, 1000.0, 7.0, machine, curve)  # 3000 tokens per update
    assert entry.training.cost == 40.0
    assert entry.word_weights == Path("a/alignments/test.words.jsonl")


def test_what_a_run_has_not_got_is_none() -> None:
    make_run(Path("a"), worsened(3), "attention=none", gold=False, curve=False)
    entry, _ = read_run(Path("a"), "test")
    assert (entry.aer, entry.word_weights, entry.training.curve("bleu")) == (None, None, [])
    assert (entry.training.seconds, entry.training.update_seconds, entry.training.cost) == (60.0, None, None)


def test_only_seed_and_machine_leave_the_configuration_the_same() -> None:
    def config(*overrides: str) -> str:
        return read_run(make_run(Path("a"), REFERENCES, *overrides), "test")[0].config

    before = config("seed=1")
    assert config("seed=2", "device=cpu", "threads=1", "data.cache_dir=/elsewhere") == before
    for changed in ("decoder.dropout=0.11", "search.beam_size=7", "training.max_epochs=7"):
        assert config("seed=1", changed) != before
    assert config("seed=1") == before
    manifest = Path("a/manifest.json")
    manifest.write_text(manifest.read_text().replace('"data": {}', '"data": {"content": "of another corpus"}'))
    assert read_run(Path("a"), "test")[0].config != before


def test_runs_that_began_with_different_seeds_of_one_system_are_one_system() -> None:
    def config(start: str, system: str) -> str:
        make_run(Path("a"), REFERENCES, f"training.start_from={start}")
        began = {"start_from": {"run": start, "step": 3, "system": system}}
        manifest = json.loads(Path("a/manifest.json").read_text())
        manifest["starts"] = [{**manifest["starts"][0], **began}, {}]
        Path("a/manifest.json").write_text(json.dumps(manifest))
        return read_run(Path("a"), "test")[0].config

    assert config("/one", "x") == config("/two", "x")
    assert config("/one", "x") != config("/one", "y")


def test_runs_are_found_by_name_folder_and_pattern() -> None:
    for name in ("sweep/x/a", "sweep/x/b", "other/c"):
        make_run(Path(name), REFERENCES)
    assert find_runs(["other/c"]) == {Path("other/c"): True}
    assert find_runs(["sweep"]) == {Path("sweep/x/a"): False, Path("sweep/x/b"): False}
    assert find_runs(["."]) == {Path("other/c"): False, Path("sweep/x/a"): False, Path("sweep/x/b"): False}
    assert list(find_runs(["sweep/*/b", "*/*"])) == [Path("sweep/x/b"), Path("other/c"), Path("sweep/x/a")]
    Path("empty").mkdir()
    for given, message in (("no*", "no run or pattern matches"), ("empty", "is neither a run nor a folder that holds")):
        with pytest.raises(UserError, match=f"runs={re.escape(given)}: {message}"):
            find_runs([given])


def test_a_run_counts_once_whatever_leads_to_it(tmp_path: Path) -> None:
    make_run(Path("a"), REFERENCES)
    Path("link").symlink_to("a")
    assert find_runs(["*", "l*", "."]) == {Path("a"): False}
    assert find_runs(["*", "link", "link/../a", str(tmp_path / "a")]) == {Path("a"): True}


def test_a_run_without_results_says_how_to_get_them() -> None:
    make_run(Path("a"), REFERENCES)
    with pytest.raises(UserError, match=r"split=validation: the corpus of a has none \(there is: test\)"):
        read_run(Path("a"), "validation")
    os.remove("a/hypotheses/test.txt")
    with pytest.raises(UserError, match="a: has no test results; run nmt-evaluate run=a split=test"):
        read_run(Path("a"), "test")
    write(Path("a/hypotheses/test.txt"), REFERENCES[1:])
    with pytest.raises(UserError, match=r"a/hypotheses/test\.txt: has 59 lines for 60 sentences"):
        read_run(Path("a"), "test")


@pytest.mark.parametrize(
    ("metrics", "updates"),
    [
        ('{"step": 10, "epoch": 1.0, "validation/bleu": 30.0}\n{"step": 12}\n', 12),  # a run in progress
        ('{"step": 20, "epoch": 1.0, "validation/bleu": 0.0, "validation/perplexity": 7.4e+23}\n', 20),  # diverged
        ('{"step": 20, "epoch": 1.0, "validation/bleu": 3.0}\n{"epoch": 3.0, "validation/bleu": 3', 20),  # cut short
    ],
)
def test_a_run_has_made_the_updates_that_its_metrics_name(metrics: str, updates: int) -> None:
    make_run(Path("a"), REFERENCES)
    Path("a/metrics.jsonl").write_text(metrics)
    Path("a/manifest.json").write_text('{"starts": [{}]}')
    training = read_run(Path("a"), "test")[0].training
    assert (training.updates, len(training.validations), training.perplexity) == (updates, 1, None)


def test_systems_are_files_of_translations() -> None:
    text = "".join(f"{line}\r\n" for line in worsened(2)).encode()
    for name, content in (("plain", text), ("marked", b"\xef\xbb\xbf" + text), ("small.gz", gzip.compress(text))):
        Path(name).write_bytes(content)
        (entry,) = read_systems([f"their system={name}"], HeldOut(SOURCES, REFERENCES, PLAIN))
        assert (entry.name, entry.hypotheses, entry.seed, entry.config) == ("their system", worsened(2), None, "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["their.de"], r"systems=their\.de: expected NAME=FILE"),
        (["x=short.de"], r"short\.de has 59 lines, the held-out set 60; line N must be the translation of source"),
        (["x=their.de", "x=their.de"], "two systems named x"),
    ],
)
def test_systems_that_do_not_fit_are_refused(given: list[str], message: str) -> None:
    write(Path("their.de"), REFERENCES)
    write(Path("short.de"), REFERENCES[1:])
    with pytest.raises(UserError, match=message):
        read_systems(given, HeldOut(SOURCES, REFERENCES, PLAIN))
