"""Translations whose first tokens, or whose attention at some steps, a user decides."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_translator import LINES, run  # noqa: F401

from nmt import Translator
from nmt.config.errors import UserError

LINE = LINES[2]


@pytest.fixture(scope="module", params=["beam", "greedy"])
def translator(run: Path, request: pytest.FixtureRequest) -> Translator:  # noqa: F811
    return Translator.load(run, search={"kind": request.param})


def test_a_steered_step_attends_there_and_the_steps_before_stay(translator: Translator) -> None:
    (free,) = translator.translate([LINE])
    step = len(free.tokens) // 2
    for position in range(len(free.source_tokens)):
        (steered,) = translator.translate([LINE], attend={step: position}, prefix=free.tokens[:step])
        assert steered.tokens[:step] == free.tokens[:step]
        assert steered.alignment is not None
        assert free.alignment is not None
        assert steered.alignment[step].tolist() == np.eye(len(free.source_tokens))[position].tolist()
        np.testing.assert_allclose(steered.alignment[:step], free.alignment[:step], atol=1e-6)


def test_its_own_weights_given_back_change_nothing(translator: Translator) -> None:
    (free,) = translator.translate([LINE])
    assert free.alignment is not None
    attend = {step: row.tolist() for step, row in enumerate(free.alignment)}
    (again,) = translator.translate([LINE], attend=attend, prefix=free.tokens[:-1])
    assert again.tokens == free.tokens
    assert again.log_prob == pytest.approx(free.log_prob, abs=1e-5)
    np.testing.assert_allclose(again.alignment, free.alignment, atol=1e-6)


def test_somewhere_else_the_probabilities_change(translator: Translator) -> None:
    (free,) = translator.translate([LINE])
    (scored,) = translator.score([LINE], [free.text])
    (steered,) = translator.score([LINE], [free.text], attend={1: 0})
    assert steered.alignment is not None
    assert steered.alignment[1].tolist() == np.eye(len(free.source_tokens))[0].tolist()
    assert steered.token_log_probs[0] == pytest.approx(scored.token_log_probs[0], abs=1e-6)
    assert steered.token_log_probs[1] != pytest.approx(scored.token_log_probs[1], abs=1e-6)


def test_a_text_is_continued(translator: Translator) -> None:
    (continued,) = translator.translate([LINE], prefix="le chien")
    assert continued.text.startswith("le chien")
    assert sum(continued.token_log_probs) == pytest.approx(continued.log_prob, abs=1e-4)
    (scored,) = translator.score([LINE], [continued.text])
    if scored.tokens == continued.tokens:  # not where the search spelled the text in another way
        assert scored.token_log_probs == pytest.approx(continued.token_log_probs, abs=1e-4)


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        ({"attend": {0: 99}}, "step 0 attends to position 99, but the source has positions 0 to"),
        ({"attend": {0: -1}}, "step 0 attends to position -1"),
        ({"attend": {-1: 0}}, "step -1 does not exist"),
        ({"attend": {2: [0.5]}}, "step 2 has 1 weights for"),
        ({"attend": {2: [2.0] + [0.0] * 50}}, "step 2 has 51 weights for"),
        ({"prefix": ["not a piece"]}, "'not a piece' is no piece"),
        ({"prefix": ["</s>"]}, "'</s>' is no piece"),
    ],
)
def test_what_is_impossible_is_refused(translator: Translator, guidance: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        translator.translate([LINE], **guidance)  # type: ignore[arg-type]


def test_weights_must_be_a_distribution_or_less(translator: Translator) -> None:
    length = len(translator.translate([LINE])[0].source_tokens)
    for weights in ([1.0] * length, [-0.1, 1.1, *[0.0] * (length - 2)], [float("nan")] * length):
        with pytest.raises(UserError, match="must not be negative, nor sum to more than 1"):
            translator.translate([LINE], attend={1: weights})


def test_searches_with_other_settings_share_the_model(translator: Translator) -> None:
    searcher = translator.searcher
    other = searcher.with_settings(translator.search.model_copy(update={"max_length": 3}))
    sources, _ = translator.encode([LINE])
    found = [next(iter(each.search([[0]], sources, 0, 1)))[1][0][0].tokens for each in (other, searcher, other)]
    assert found[0] == found[2]
    assert len(found[0]) <= 3 < len(found[1])
    before = searcher._prepared.get(searcher.beam_size)
    assert other._prepared.get(searcher.beam_size) is before
    with torch.no_grad():
        next(translator.model.parameters()).add_(0.0)
    assert other._prepared.get(searcher.beam_size) is not before
