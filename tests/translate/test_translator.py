"""The Python API on a small trained run."""

import html
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trained import LINES, run  # noqa: F401

from nmt import Translator
from nmt.config.errors import UserError
from nmt.translate import translator as module

SAMPLING = {"kind": "sampling", "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:  # noqa: F811
    return Translator.load(run)


def test_a_translation_for_each_line(translator: Translator) -> None:
    found = translator.translate(LINES)
    assert (len(found), found[1].text, found[1].alignment) == (len(LINES), "", None)
    for line, each in zip(LINES, found, strict=True):
        alone = translator.translate([line])[0]
        assert alone.text == each.text
        assert alone.log_prob == pytest.approx(each.log_prob, abs=1e-4)
    for each in (found[0], *found[2:]):
        assert each.source_tokens[-1] == each.tokens[-1] == "</s>"
        assert each.alignment is not None
        assert each.alignment.shape == (len(each.tokens), len(each.source_tokens))
        np.testing.assert_allclose(each.alignment.sum(1), 1, rtol=1e-5)
        assert each.log_prob < 0


def test_a_translation_draws_itself(translator: Translator) -> None:
    """A notebook shows the escaped text, and a table with a cell per pair of words and weights as titles."""
    shown, blank = translator.translate(LINES[:2])
    weights = shown.word_weights()
    assert weights is not None
    table = replace(shown, text="a < b")._repr_html_()
    assert "<b>a &lt; b</b>" in table
    assert table.count("<td ") == len(weights["source"]) * len(weights["target"])
    assert f"{html.escape(weights['target'][0])} ← {weights['source'][1]}: {weights['weights'][0][1]} %" in table
    rows = shown.plot().axes[0].get_yticklabels()
    assert len(rows) == len(shown.tokens)
    assert "<table>" not in blank._repr_html_()
    with pytest.raises(UserError, match="no attention"):
        blank.plot()


def test_where_nothing_is_found_the_translation_is_empty(run: Path) -> None:  # noqa: F811
    broken = Translator.load(run, search={"kind": "beam"})
    with torch.no_grad():
        for weights in broken.single.output.parameters():
            weights.fill_(math.nan)
    assert [each.text for each in broken.translate(LINES)] == [""] * len(LINES)


@pytest.mark.parametrize("search", [{}, SAMPLING])
def test_threads_share_batches_and_change_nothing(
    run: Path,  # noqa: F811
    search: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines, done, results, used = [*LINES, "the " * 9, "a dog sleeps"] * 3, [], [], set[int]()
    monkeypatch.setattr(module, "MIN_THREAD_TOKENS", 1)

    def noted(self: Translator, *given: Any) -> Any:  # noqa: ANN401
        used.add(threading.get_ident())
        return encoded(self, *given)

    encoded = Translator._encoded_batch
    monkeypatch.setattr(Translator, "_encoded_batch", noted)
    for threads in (1, 2):
        used.clear()
        translator = Translator.load(run, search={**search, "batch_tokens": 40}, threads=threads)
        try:
            results.append([nbest[0] for nbest in translator.translate_nbest(lines, 1, progress=done.append)])
            assert (used == {threading.get_ident()}) == (threads == 1)
            with ThreadPoolExecutor(1) as pool:  # a new thread has the process's setting, not the calling thread's
                assert pool.submit(torch.get_num_threads).result() == threads
        finally:
            torch.set_num_threads(1)
    assert len(done) > 4
    assert sum(done) == 2 * sum(bool(line) for line in lines)
    for one, two in zip(*results, strict=True):
        assert one.text == two.text
        assert one.log_prob == pytest.approx(two.log_prob, abs=1e-4)


def test_samples_depend_on_the_line_and_the_seed(run: Path) -> None:  # noqa: F811
    drawn = [[each.text for each in Translator.load(run, search=SAMPLING, seed=s).translate(LINES)] for s in (1, 1, 2)]
    one_by_one = Translator.load(run, search=SAMPLING, seed=1)
    assert [one_by_one.translate([line])[0].text for line in LINES] == drawn[0] == drawn[1] != drawn[2]


def test_another_search_has_its_usual_settings(run: Path) -> None:  # noqa: F811
    translator = Translator.load(run, search={"kind": "sampling", "top_k": 3, "max_length": 9})
    settings = translator.settings.model_dump()
    assert [settings[key] for key in ("kind", "temperature", "top_k", "max_length")] == ["sampling", 1.0, 3, 9]
    assert Translator.load(run, search={"kind": "mbr"}).settings.kind == "mbr"
    with pytest.raises(UserError, match=r"search\.kind=sampled: not one of"):
        Translator.load(run, search={"kind": "sampled"})


def test_links_count_the_words_of_the_text(translator: Translator) -> None:
    line, prefix = "the ca☃t sleeps .", ["▁le", "▁c", "a", "<unk>", "t"]
    (found,) = translator.translate([line], prefix=prefix, attend={3: 3})
    weights = found.word_weights()
    assert weights is not None
    assert "<unk>" in found.tokens
    assert [word for word in weights["target"] if word != "</s>"] == found.text.split()


def test_samples_of_a_line_share_the_budget_of_a_batch(run: Path) -> None:  # noqa: F811
    translator = Translator.load(run, search=SAMPLING | {"batch_tokens": 100})
    sources = [[5] * 9 + [1]] * 10
    assert [len(batch) for batch in translator.batches(sources)] == [10]
    assert [len(batch) for batch in translator.batches(sources, n=5)] == [2] * 5


def test_lengths_are_limited(run: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    short = Translator.load(run, search={"max_length": 4}).translate(LINES[:1])[0]
    assert len(short.tokens) <= 4
    for wanted in (1, 12):
        eager = Translator.load(run, search={"min_length": wanted})
        with torch.no_grad():
            eager.model.output.bias[eager.tokenizers.target.eos] += 100  # EOS is the most probable token at each step
        assert len(eager.translate(LINES[:1])[0].tokens) == wanted
    translator = Translator.load(run, search={"max_source_length": 5})
    logging.getLogger("nmt").propagate = True
    found = translator.translate(["the cat sees the small dog and the red house ."])[0]
    assert (len(found.source_tokens), found.source_tokens[-1]) == (5, "</s>")
    assert all(said in caplog.text for said in ("line 1", "search.max_source_length=5"))


def test_forced_decoding_agrees_with_search(translator: Translator) -> None:
    best = translator.translate(LINES[:1])[0]
    forced = translator.score(LINES[:1], [best.text])[0]
    assert forced.tokens == best.tokens
    assert forced.log_prob == pytest.approx(best.log_prob, abs=1e-3)
    assert forced.score == pytest.approx(best.score, abs=1e-4)
    assert forced.alignment is not None
    assert best.alignment is not None
    np.testing.assert_allclose(forced.alignment, best.alignment, atol=1e-4)
    worse, *others = translator.score([LINES[0], "", "the cat"], [best.text + " chat chat", "le chat", ""])
    assert worse.log_prob < best.log_prob
    assert all(other.tokens[-1] == "</s>" and np.isfinite(other.log_prob) for other in others)


def test_word_weights_name_the_words_of_both_sentences(translator: Translator) -> None:
    line = "the cat sleeps ."
    (found,) = translator.translate([line])
    weights = found.word_weights()
    assert weights is not None
    assert weights["source"] == [*line.split(), "</s>"]
    assert " ".join(weights["target"]).removesuffix("</s>").split() == found.text.split()
    assert np.shape(weights["weights"]) == (len(weights["target"]), len(weights["source"]))
    assert all(abs(sum(row) - 100) <= len(row) / 2 for row in weights["weights"])
    heaviest = {int(np.argmax(row)) for row in weights["weights"]}
    assert {int(link.split("-")[0]) for link in found.word_alignment().split()} <= heaviest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"search": {"beam_sise": 3}}, r"search\.beam_sise: unknown key; did you mean 'beam_size'"),
        ({"checkpoint": "worst"}, "checkpoint=worst: not one of best, last"),
        ({"device": "cuda"}, "device=cuda"),
        ({"search": "greedy"}, "search=greedy: is a section"),
        ({"precision": "fp16"}, "precision=fp16 needs a CUDA GPU"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, object], message: str, run: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match=message) as error:
        Translator.load(run, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_model_in_training_is_prepared_for_search_again(run: Path) -> None:  # noqa: F811
    translator, fresh = Translator.load(run), Translator.load(run)
    translator.translate(LINES)
    for parameter in [*translator.model.parameters(), *fresh.model.parameters()]:
        # This leaves the parameter's version number unchanged, as fused optimizers of some torch releases do.
        parameter.data.add_(0.1)
    translator.model.train()
    expected = [each.log_prob for each in fresh.translate(LINES)]
    assert [each.log_prob for each in translator.translate(LINES)] == expected
