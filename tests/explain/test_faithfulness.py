"""Faithfulness of attention, for a model whose output depends on one source token, and for trained models."""

import copy
import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trained import blind, copying  # noqa: F401

from nmt.config.compose import config_dir
from nmt.config.schema.commands import Evaluation, TrainConfig
from nmt.evaluate.evaluation import evaluate_run, score_settings
from nmt.explain import explanation
from nmt.explain import faithfulness as module
from nmt.explain.faithfulness import (
    MASKS,
    areas,
    faithfulness,
    kendall_tau,
    masking_curves,
    masking_order,
    measure_pair,
)
from nmt.model.output import NEVER, OutputLayer, Readouts
from nmt.system.run import RunDirectory
from nmt.training.job import train
from nmt.translate.translator import Translator

PAIR = "the cat sees the dog in the garden .", "le chat voit le chien dans le jardin ."


@pytest.fixture(params=["copying", "blind"])
def run(request: pytest.FixtureRequest) -> RunDirectory:
    return RunDirectory(request.getfixturevalue(request.param))


@pytest.fixture
def translator(run: RunDirectory) -> Translator:
    return Translator.load(run.path)


class OneTokenDecides(nn.Module):
    """A model in which the source token `key` makes the tokens of the reference likely; without it, all tokens are
    equally likely. The model attends to the source token `looks_at`."""

    attends = True

    def __init__(self, vocabulary: int, reference: list[int], key: int, looks_at: int) -> None:
        super().__init__()
        self.source_embedding, self.target_embedding = nn.Embedding(vocabulary, 2), nn.Embedding(vocabulary, 2)
        nn.init.ones_(self.source_embedding.weight)
        self.likely = torch.zeros(vocabulary)
        self.likely[reference] = 5.0  # with 10, gradients would vanish in float32
        self.key, self.looks_at = key, looks_at
        layer = OutputLayer(self.likely[:, None], torch.zeros(vocabulary), None)
        self.output, self.models = SimpleNamespace(layer=lambda: layer), (self,)

    def encode(self, source: Tensor, lengths: Tensor, embedded: Tensor) -> Tensor:
        assert len(embedded) == len(lengths) == len(source)
        return embedded[:, self.key].sum(1)

    def decode(self, target: Tensor, state: Tensor) -> SimpleNamespace:
        return SimpleNamespace(prediction=Readouts(state[:, None, None].expand(*target.shape, 1)))

    def force(self, source: Tensor, lengths: Tensor, target_in: Tensor, target_out: Tensor, pad: int) -> Any:  # noqa: ANN401
        weights = torch.zeros(1, target_in.shape[1], source.shape[1])
        weights[:, :, self.looks_at] = 1
        return SimpleNamespace(weights=weights)


def decided(translator: Translator, key: int, looks_at: int) -> Translator:
    made = copy.copy(translator)
    reference = translator.tokenizers.target.encode([PAIR[1]])[0]
    vocabulary = translator.single.target_embedding.num_embeddings
    made.model = OneTokenDecides(vocabulary, reference, key, looks_at)  # type: ignore[assignment]
    return made


def test_masking_the_token_that_decides_collapses_the_probability_at_once(translator: Translator) -> None:
    right, wrong = (measure_pair(decided(translator, 3, looks_at), *PAIR, 1) for looks_at in (3, 1))
    for curves in (right.curves["attention"], right.curves["saliency"], wrong.curves["saliency"]):
        assert (curves[:, 1:] < 0.02).all()
        np.testing.assert_allclose(areas(curves), 1 / (2 * MASKS), atol=0.02)
    for curves in (wrong.curves["attention"], wrong.curves["random"]):
        assert (areas(curves) >= 1 / (2 * MASKS)).all()
        assert (areas(curves) <= 1).all()
        assert areas(curves).mean() > 0.3
    assert (wrong.curves["attention"][:, 1] == 1).all()
    np.testing.assert_allclose(right.curves["random"], wrong.curves["random"])
    assert right.tau is not None
    assert wrong.tau is not None
    positions = len(translator.encode([PAIR[0]])[0][0])
    np.testing.assert_allclose(right.tau, 1)
    np.testing.assert_allclose(wrong.tau, -1 / (positions - 1))


def test_aer_by_each_view_is_that_of_its_links(translator: Translator) -> None:
    made = decided(translator, 0, 1)  # "the" decides, but the model attends to the next piece
    links = measure_pair(made, *PAIR, 1).links
    assert links["saliency"] == {(0, j) for j in range(9)}
    figures = faithfulness(made, [PAIR[0]], [PAIR[1]], ["0-0 0-1 1-1 0p3"], 5)
    # Of 9 links proposed, 2 are sure and 3 possible; gold has 3 sure links.
    assert figures["aer_saliency"] == pytest.approx(1 - (2 + 3) / (9 + 3), abs=1e-4)
    assert faithfulness(made, [PAIR[0]], [PAIR[1]], None, 5)["aer_saliency"] is None


def test_neither_batches_nor_other_sentences_change_a_figure(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator.model.double()
    together = measure_pair(translator, *PAIR, 1)
    monkeypatch.setattr(module, "TOKENS", 40)
    monkeypatch.setattr(explanation, "COPIES", 3)
    measure_pair(translator, PAIR[0], "le chien dort .", 1)
    apart = measure_pair(translator, *PAIR, 7)
    assert apart.links == together.links
    for order, curves in together.curves.items():
        np.testing.assert_allclose(apart.curves[order], curves, rtol=1e-6)
        assert (curves[:, 0] == 1).all()


def test_curves_are_those_of_each_mask_by_itself(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks the first source tokens one after the other, which then are not copied either. Decodes once per mask,
    without batches.
    """
    translator.model.double()
    first = lambda weights, random: np.tile(np.arange(MASKS), (len(weights), 1))  # noqa: E731
    monkeypatch.setattr(module, "masking_order", first)
    found = measure_pair(translator, *PAIR, 1)
    model, tokenizers = translator.single, translator.tokenizers
    source, target = (torch.tensor(side.encode([text])) for side, text in zip(tokenizers, PAIR, strict=True))
    started = torch.cat([torch.tensor([[tokenizers.target.bos]]), target[:, :-1]], 1)
    log_probs = []
    with torch.no_grad():
        for masks in range(MASKS + 1):
            embedded = model.source_embedding(source)
            embedded[:, :masks] = 0
            copyable = source.clone()
            copyable[:, :masks] = NEVER
            state = model.encode(copyable, torch.tensor([source.shape[1]]), embedded)
            decoded = model.decoder(model.target_embedding(started), state)
            log_probs.append(model.log_probs(decoded.prediction, target, tokenizers.target.pad)[0])
    expected = (torch.stack(log_probs, 1) - log_probs[0][:, None]).clamp(max=0).exp()
    for curves in found.curves.values():
        np.testing.assert_allclose(curves, expected, rtol=1e-6)


def test_the_entry_gains_figures_and_nothing_else_changes(run: RunDirectory, translator: Translator) -> None:
    settings = score_settings(Evaluation(metrics=["bleu", "chrf", "ter"], tokenize="auto", lowercase=False), "fr")
    plain, _ = evaluate_run(run, translator, "test", settings, "best")
    with_figures, _ = evaluate_run(run, translator, "test", settings, "best", faithfulness_sentences=100)
    assert json.loads(run.results.read_text())["test"] == with_figures
    assert [key for key in with_figures if key != "faithfulness"] == list(plain)
    figures = with_figures["faithfulness"]
    assert figures["sentences"] == 8
    if translator.model.attends:
        assert figures["aer_attention"] == with_figures["aer"]
        assert -1 <= figures["tau"] <= 1
        assert figures.keys() == {"sentences", "tokens", "tau", "curves"} | {
            *(f"aer_{view}" for view in ("attention", "saliency")),
            *(f"area_{order}" for order in ("attention", "saliency", "random")),
        }
    else:
        missing = [key for key, value in figures.items() if value is None]
        assert missing == ["tau", "aer_attention", "area_attention"]
    for order, curve in figures["curves"].items():
        assert len(curve) == MASKS + 1
        assert areas(np.array([curve]))[0] == pytest.approx(figures[f"area_{order}"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml")))
def test_every_preset_has_figures(preset: str, train_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    assert train(train_config(f"attention={preset}", "training.max_steps=1"), tmp_path / "run", []) == 0
    run, translator = RunDirectory(tmp_path / "run"), Translator.load(tmp_path / "run")
    figures = faithfulness(translator, *run.held_out("test"), 2)
    known = {key for key, value in figures.items() if value is not None}
    assert {"aer_saliency", "area_saliency", "area_random"} <= known
    assert ("area_attention" in known) == translator.model.attends


def counted_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Compute tau-b by its definition, pair by pair."""
    concordant = discordant = ties_first = ties_second = pairs = 0
    for i, j in combinations(range(len(first)), 2):
        pairs += 1
        ties_first += first[i] == first[j]
        ties_second += second[i] == second[j]
        if first[i] == first[j] or second[i] == second[j]:
            continue
        if (first[i] < first[j]) == (second[i] < second[j]):
            concordant += 1
        else:
            discordant += 1
    scale = ((pairs - ties_first) * (pairs - ties_second)) ** 0.5
    return (concordant - discordant) / scale if scale else float("nan")


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("values", [2, 4, 1000])  # few values give many ties
def test_tau_is_that_of_a_count_over_pairs(size: int, values: int) -> None:
    first, second = np.random.default_rng(size).integers(values, size=(2, 20, size)) / values
    expected = [counted_tau(*rows) for rows in zip(first, second, strict=True)]
    np.testing.assert_allclose(kendall_tau(first, second), expected)


def test_tokens_are_masked_by_falling_weight_and_equal_ones_at_random() -> None:
    weights = np.array([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    random = np.array([[0.1, 0.2, 0.3], [0.9, 0.5, 0.2], [0.9, 0.1, 0.2]])
    assert masking_order(weights, random).tolist() == [[1, 2, 0], [1, 2, 0], [1, 2, 0]]
    assert masking_order(np.zeros((1, 9)), np.arange(9.0)[None, ::-1]).tolist() == [[8, 7, 6, 5, 4]]


def test_curves_start_at_one_and_stay_between_zero_and_one() -> None:
    unmasked = np.log([0.8, 0.2])
    masked = np.log([[0.4, 0.2], [0.6, 0.1]])
    curves = masking_curves(masked, unmasked)
    np.testing.assert_allclose(curves, [[1, 0.5, *[0.25] * (MASKS - 1)], [1, 1, *[0.5] * (MASKS - 1)]])
    assert masking_curves(np.full((1, 1), -np.inf), np.zeros(1)).tolist() == [[1.0, *[0.0] * MASKS]]


def test_areas_lie_between_those_of_the_fastest_fall_and_of_none() -> None:
    collapse, none, linear = [1.0, *[0.0] * MASKS], [1.0] * (MASKS + 1), np.linspace(1, 0, MASKS + 1)
    np.testing.assert_allclose(areas(np.array([collapse, none, linear])), [1 / (2 * MASKS), 1, 0.5])
    curves = np.random.default_rng(1).random((50, MASKS + 1))
    np.testing.assert_allclose(areas(curves), np.trapezoid(curves, dx=1 / MASKS, axis=1))
