"""The one scoring path."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import pytest
from forks import ended, forked

from nmt.compare.entry import count_sentences, read_run
from nmt.config.errors import UserError
from nmt.config.schema import Evaluation, TrainConfig
from nmt.data.word_alignment import parse_pharaoh
from nmt.evaluate.bleu import score
from nmt.evaluate.evaluation import align, evaluate, evaluate_run, score_settings
from nmt.system.files import read_lines
from nmt.system.run import RunDirectory, read_json
from nmt.training.job import train
from nmt.translate.translator import Translator


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    from conftest import TINY, values_of

    from nmt.config.compose import validated

    directory = tmp_path_factory.mktemp("evaluation") / "run"
    assert train(validated(TrainConfig, values_of("train", TINY)), directory, []) == 0
    return RunDirectory(directory)


@pytest.mark.parametrize(("language", "expected"), [("de", "13a"), ("zh", "zh")])
def test_the_tokenizer_follows_the_target_language_unless_given(language: str, expected: str) -> None:
    assert score_settings(Evaluation(tokenize="auto", lowercase=True), language).tokenize == expected
    assert score_settings(Evaluation(tokenize="none", lowercase=True), language).tokenize == "none"
    assert score_settings(Evaluation(tokenize="auto", lowercase=True), language).lowercase


def test_an_unknown_tokenizer_is_told_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"evaluation\.tokenize: '13b' is unknown"):
        score_settings(Evaluation(tokenize="13b", lowercase=False), "de")


def test_scores_are_those_of_the_written_translations(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = score_settings(Evaluation(tokenize="auto", lowercase=False), "fr")
    translator = Translator.load(run.path)
    result, found = evaluate_run(run, translator, "test", settings, "best")
    written = (run.hypotheses / "test.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert written == found.hypotheses
    _, references, _ = run.held_out("test")
    again = score(written, references, settings)
    assert (result["bleu"], result["chrf"], result["ter"]) == tuple(
        round(value, 4) for value in (again.bleu, again.chrf or 0, again.ter or 0)
    )
    assert json.loads(run.results.read_text())["test"] == result
    assert result["sentences"] == 8
    with monkeypatch.context() as patch:  # nmt-compare reads the statistics that the evaluation left
        patch.setattr("nmt.evaluate.bleu.write_counts", lambda *_: pytest.fail("counted again"))
        entry, held_out = read_run(run.path, "test")
        assert count_sentences(entry, held_out).scores() == again


def test_two_evaluations_of_one_run_at_a_time_keep_the_results_of_both(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))
    copy.results.unlink()
    settings, translator = score_settings(Evaluation(tokenize="auto", lowercase=False), "fr"), Translator.load(run.path)
    ready = Barrier(2, timeout=60)

    def slowly(path: Path) -> dict[str, Any]:
        values = read_json(path)
        with suppress(BrokenBarrierError):
            ready.wait(0.5)  # for the other process to read the file as well
        return values

    monkeypatch.setattr("nmt.system.run.read_json", slowly)

    def evaluate_split(split: str) -> int:
        evaluate_run(copy, translator, split, settings, "best")
        return 0

    splits = ("validation", "test")
    children = [forked(partial(evaluate_split, split), tmp_path / "output") for split in splits]
    assert [ended(child) for child in children] == [0, 0], (tmp_path / "output").read_text()
    assert read_json(copy.results).keys() == set(splits)


def test_sampling_is_scored_the_same_each_time(run: RunDirectory) -> None:
    search = {"kind": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    translator = Translator.load(run.path, search=search)
    settings = score_settings(Evaluation(tokenize="auto", lowercase=False), "fr")
    sources, references, _ = run.held_out("test")
    first, second = (evaluate(translator, sources, references, settings, ("bleu",)) for _ in range(2))
    assert first.hypotheses == second.hypotheses
    translator.seed = 9
    assert evaluate(translator, sources, references, settings, ("bleu",)).hypotheses != first.hypotheses


def test_alignment_scores_compare_forced_attention_with_gold(run: RunDirectory) -> None:
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
    without_gold = align(translator, sources, references, None)
    assert without_gold == (aligned.pharaoh, {})


def test_alignments_of_translations_and_references_are_written(run: RunDirectory) -> None:
    settings = score_settings(Evaluation(tokenize="auto", lowercase=False), "fr")
    translator = Translator.load(run.path)
    _, found = evaluate_run(run, translator, "test", settings, "best")
    sources, references, gold = run.held_out("test")
    aligned = align(translator, sources, references, gold)
    assert aligned is not None
    assert read_lines(run.alignments / "test.references.pharaoh") == aligned.pharaoh
    links = read_lines(run.alignments / "test.translations.pharaoh")
    assert links == [each.word_alignment() for each in found.translations]
    weights = [json.loads(line) for line in read_lines(run.alignments / "test.words.jsonl")]
    assert weights == [each.word_weights() for each in found.translations]
    for line, source, translation in zip(links, sources, found.hypotheses, strict=True):
        for i, j in parse_pharaoh(line)[0]:
            assert i < len(source.split())
            assert j < len(translation.split())


def test_a_model_without_attention_has_no_alignment_scores(
    train_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    train(train_config("attention=none", "training.max_steps=1"), tmp_path / "run", [])
    translator = Translator.load(tmp_path / "run")
    assert align(translator, ["the cat"], ["le chat"], ["0-0 1-1"]) is None
