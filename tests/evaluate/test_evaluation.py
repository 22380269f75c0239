"""Evaluations: scores, stored results and translations."""

import json
from pathlib import Path

import pytest
from trained import run as trained_run  # noqa: F401

from nmt.compare.entry import count_sentences, read_run
from nmt.config.errors import UserError
from nmt.config.schema.commands import Evaluation
from nmt.data.word_alignment import parse_pharaoh
from nmt.evaluate.evaluation import align, evaluate, evaluate_run, score_settings
from nmt.evaluate.metrics import score
from nmt.system.files import read_lines
from nmt.system.run import RunDirectory
from nmt.translate.translator import Translator

SETTINGS = score_settings(Evaluation(metrics=["bleu", "chrf", "ter"], tokenize="auto", lowercase=False), "fr")


@pytest.fixture(scope="module")
def run(trained_run: Path) -> RunDirectory:  # noqa: F811
    return RunDirectory(trained_run)


@pytest.mark.parametrize(("language", "expected"), [("de", "13a"), ("zh", "zh")])
def test_the_tokenizer_follows_the_target_language_unless_given(language: str, expected: str) -> None:
    given = {"metrics": ["bleu", "chrf", "ter"], "lowercase": True}
    assert score_settings(Evaluation(tokenize="auto", **given), language).tokenize == expected
    assert score_settings(Evaluation(tokenize="none", **given), language).tokenize == "none"
    assert score_settings(Evaluation(tokenize="auto", **given), language).lowercase


def test_scores_are_those_of_the_written_translations(run: RunDirectory) -> None:
    translator = Translator.load(run.path)
    result, found = evaluate_run(run, translator, "test", SETTINGS, "best")
    written = (run.hypotheses / "test.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert written == found.hypotheses
    _, references, _ = run.held_out("test")
    again = score(written, references, SETTINGS)
    assert {name: result[name] for name in again} == {name: round(value, 4) for name, value in again.items()}
    assert json.loads(run.results.read_text())["test"] == result
    assert result["sentences"] == 8
    entry, held_out = read_run(run.path, "test")
    assert count_sentences(entry, held_out).scores() == again


def test_a_damaged_file_of_results_is_an_error_before_translation(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.results.read_text()
    monkeypatch.setattr("nmt.evaluate.evaluation.evaluate", lambda *_, **__: pytest.fail("translated"))
    run.results.write_text('{"test": ')
    with pytest.raises(UserError, match=r"results\.json: cannot be read .*; if it is damaged, .* or delete it"):
        evaluate_run(run, Translator.load(run.path), "test", SETTINGS, "best")
    run.results.write_text(before)


def test_other_settings_have_results_of_their_own(run: RunDirectory) -> None:
    """An evaluation with another search leaves the results and translations of the run as they are."""
    before = json.loads(run.results.read_text())["test"], (run.hypotheses / "test.txt").read_bytes()
    translator = Translator.load(run.path, search={"kind": "greedy"})
    result, _ = evaluate_run(run, translator, "test", SETTINGS, "best", suffix="greedy")
    results = json.loads(run.results.read_text())
    assert (results["test"], (run.hypotheses / "test.txt").read_bytes()) == before
    assert results["test.greedy"] == result
    assert (run.hypotheses / "test.greedy.txt").is_file()


def test_sampling_is_scored_the_same_each_time(run: RunDirectory) -> None:
    search = {"kind": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    translator = Translator.load(run.path, search=search)
    sources, references, _ = run.held_out("test")
    first, second = (evaluate(translator, sources, references, SETTINGS, ("bleu",)) for _ in range(2))
    assert first.hypotheses == second.hypotheses
    translator.seed = 9
    assert evaluate(translator, sources, references, SETTINGS, ("bleu",)).hypotheses != first.hypotheses


def test_alignments_are_scored_and_written(run: RunDirectory) -> None:
    sources, references, gold = run.held_out("test")
    assert gold is not None
    translator = Translator.load(run.path)
    aligned = align(translator, sources, references, gold)
    assert aligned is not None
    assert set(aligned.scores) == {"aer", "alignment_precision", "alignment_recall"}
    assert aligned.pharaoh == [each.word_alignment() for each in translator.score(sources, references)]
    own = align(translator, sources, references, aligned.pharaoh)
    assert own is not None
    assert own.scores["aer"] == pytest.approx(0)
    assert align(translator, sources, references, None) == (aligned.pharaoh, {})
    _, found = evaluate_run(run, translator, "test", SETTINGS, "best")
    assert read_lines(run.alignments / "test.references.pharaoh") == aligned.pharaoh
    links = read_lines(run.alignments / "test.translations.pharaoh")
    assert links == [each.word_alignment() for each in found.translations]
    weights = [json.loads(line) for line in read_lines(run.alignments / "test.words.jsonl")]
    assert weights == [each.word_weights() for each in found.translations]
    for line, source, translation in zip(links, sources, found.hypotheses, strict=True):
        for i, j in parse_pharaoh(line)[0]:
            assert i < len(source.split())
            assert j < len(translation.split())
