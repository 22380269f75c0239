"""Ensembles of several trained runs, from Python and the commands."""

import json
import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config

from nmt import Translator
from nmt.compare.compare import group
from nmt.compare.entry import find_runs, read_run
from nmt.compare.report import gather
from nmt.config.errors import UserError
from nmt.config.schema.commands import Evaluation
from nmt.evaluate.evaluation import EvaluationFolder, evaluate_run, score_settings, warn_if_texts_differ
from nmt.system.files import read_lines
from nmt.system.run import RunDirectory
from nmt.training.job import train

LINES = ["the cat sleeps .", "", "a small dog sees the red house .", "x", "the"]
TARGETS = ["le chat dort .", "", "un petit chien voit la maison rouge .", "x", ""]
SETTINGS = score_settings(Evaluation(metrics=["bleu", "chrf", "ter"], tokenize="auto", lowercase=False), "fr")
MEMBERS = {
    "bahdanau": ["attention=bahdanau"],
    "luong": ["attention=luong_general", "encoder=lstm", "decoder=lstm", "decoder.layers=2", "seed=2"],
    "none": ["attention=none", "embedding.dim=12", "seed=3", "search.beam_size=5"],
}
SIZES = ["data.train_size=400", "data.validation_size=8", "data.test_size=12", "data.max_length=200"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("ensemble")
    for name, overrides in MEMBERS.items():
        config = tiny_config(*SIZES, "training.max_steps=8", *overrides)
        assert train(config, home / name, overrides, {"attention": config.attention.kind}) == 0
    shutil.copytree(home / "bahdanau", home / "lower")
    config_file = home / "lower" / "config.yaml"
    config_file.write_text(config_file.read_text().replace("lowercase: false", "lowercase: true"))
    return {name: home / name for name in (*MEMBERS, "lower")}


def three(runs: dict[str, Path]) -> list[Path]:
    return [runs[name] for name in ("bahdanau", "luong", "none")]


def test_the_same_run_twice_translates_as_once(runs: dict[str, Path]) -> None:
    path = runs["bahdanau"]
    alone, once, twice = (Translator.load(given).translate(LINES) for given in ([path], path, [path, str(path)]))
    assert [(each.text, each.log_prob) for each in alone] == [(each.text, each.log_prob) for each in once]
    assert [each.tokens for each in twice] == [each.tokens for each in once]
    assert [each.log_prob for each in twice] == pytest.approx([each.log_prob for each in once], abs=1e-4)


def test_forced_decoding_gives_the_mean_probability_and_attention(runs: dict[str, Path]) -> None:
    """Scores the empty translation, which consists of </s> alone."""
    found = Translator.load(three(runs)).score(["the cat"], [""])[0]
    each = [Translator.load(run).score(["the cat"], [""])[0] for run in three(runs)]
    assert math.exp(found.log_prob) == pytest.approx(np.mean([math.exp(one.log_prob) for one in each]), rel=1e-4)
    weights = [one.alignment for one in each if one.alignment is not None]
    assert len(weights) == 2
    np.testing.assert_allclose(found.alignment, np.mean(weights, 0), rtol=1e-5)


def test_searches_agree_with_forced_decoding(runs: dict[str, Path]) -> None:
    sampling, compared = {"kind": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0}, 0
    for search in ({"beam_size": 4, "length_penalty": "average", "alpha": 1.0}, {"kind": "greedy"}, sampling):
        translator = Translator.load(three(runs), search=search, seed=5)
        for line, found in zip(LINES, translator.translate(LINES), strict=True):
            (forced,) = translator.score([line], [found.text])
            if found.text and forced.tokens == found.tokens:  # the same text may be split into other pieces
                compared += 1
                assert forced.log_prob == pytest.approx(found.log_prob, abs=1e-3)
                np.testing.assert_allclose(forced.alignment, found.alignment, atol=1e-4)
    assert compared >= 4


def test_runs_of_other_tokenizers_are_refused(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="the runs have different source tokenizers") as error:
        Translator.load([runs["bahdanau"], runs["none"], runs["lower"]])
    assert str(error.value).startswith(f"run=[{runs['bahdanau']},{runs['lower']}]: ")


def evaluated(runs: list[Path], folder: Path, split: str = "test", **search: int) -> dict[str, object]:
    directories = [RunDirectory(run) for run in runs]
    translator = Translator.load(runs, search=search)
    apart = EvaluationFolder.at(folder, directories, translator, SETTINGS, "best")
    return evaluate_run(directories[0], translator, split, SETTINGS, "best", output=apart)[0]


def test_an_ensembles_results_stay_out_of_its_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for run in runs.values() for path in run.rglob("*") if path.is_file()}
    folder = tmp_path / "together"
    result = evaluated(three(runs), folder)
    assert {path: path.read_bytes() for run in runs.values() for path in run.rglob("*") if path.is_file()} == before
    assert json.loads((folder / "results.json").read_text()) == {"test": result}
    assert result["members"] == [str(run.resolve()) for run in three(runs)]
    sources, references, gold = RunDirectory(runs["bahdanau"]).held_out("test")
    assert RunDirectory(folder).held_out("test") == (sources, references, gold)
    expected = [each.text for each in Translator.load(three(runs)).translate(sources)]
    assert read_lines(folder / "hypotheses" / "test.txt") == expected
    written = {path.name for path in (folder / "alignments").iterdir()}
    assert written == {f"test.{name}" for name in ("translations.pharaoh", "references.pharaoh", "words.jsonl")}
    for members, search in ((three(runs)[:2], {}), (three(runs), {"beam_size": 4})):
        with pytest.raises(UserError, match=r"holds another evaluation \(.*\); name another folder"):
            evaluated(members, folder, **search)
    assert json.loads((folder / "results.json").read_text()) == {"test": result}
    evaluated(three(runs), folder, "validation")
    assert set(json.loads((folder / "results.json").read_text())) == {"test", "validation"}
    assert RunDirectory(folder).held_out("validation") == RunDirectory(runs["bahdanau"]).held_out("validation")


def test_a_comparison_takes_an_ensemble_as_a_run(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluated(three(runs)[:2], Path("evaluate/pair"))
    evaluated(three(runs), Path("evaluate/all"), beam_size=3)
    assert find_runs(["evaluate"]) == {Path("evaluate/all"): False, Path("evaluate/pair"): False}
    assert find_runs(["evaluate/pair"]) == {Path("evaluate/pair"): True}
    entry, held_out = read_run(Path("evaluate/all"), "test")
    assert entry.hypotheses == read_lines(Path("evaluate/all/hypotheses/test.txt"))
    assert entry.parameters == sum(read_run(run, "test")[0].parameters or 0 for run in three(runs))
    assert None not in (entry.aer, entry.word_weights)
    assert held_out.difference(read_run(runs["bahdanau"], "test")[1]) is None
    entries, _ = gather([*map(str, three(runs)), "evaluate"], [], "test")
    names = {system.name for system in group(entries)}
    alone, pair, every = ["bahdanau", "luong_general", "none"], "bahdanau+luong_general", "bahdanau+luong_general+none"
    assert {name.partition(" ")[0] for name in names} == {*alone, pair, every}
    assert {name.rpartition("ensemble=")[2] for name in names if "ensemble=" in name} == {"2", "3 beam_size=3"}
    Path("evaluate/pair/hypotheses/test.txt").unlink()
    members = ",".join(str(run.resolve()) for run in three(runs)[:2])
    with pytest.raises(UserError, match="has no test results") as error:
        read_run(Path("evaluate/pair"), "test")
    assert str(error.value).endswith(f"run nmt-evaluate 'run=[{members}]' output=evaluate/pair split=test")


def test_a_member_with_another_test_set_is_told(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("nmt").propagate = True
    moved = tmp_path / "moved"
    shutil.copytree(runs["luong"], moved)
    directories = [RunDirectory(runs["bahdanau"]), RunDirectory(runs["none"]), RunDirectory(moved)]
    warn_if_texts_differ(directories, "test")
    assert caplog.text == ""
    (moved / "data" / "test.source").write_text("something else\n")
    warn_if_texts_differ(directories, "test")
    assert f"{moved}: its test set differs from that of {runs['bahdanau']}" in caplog.text
