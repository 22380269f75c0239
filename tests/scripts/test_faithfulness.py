"""Faithfulness of attention, for a model whose output depends on one source token, and for trained models."""

import copy
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import script, tiny_config
from torch import Tensor, nn
from trained import blind, copying  # noqa: F401

from nmt.config.checks import config_dir
from nmt.explain import explanation
from nmt.model.output import NEVER, OutputLayer, Readouts
from nmt.system.run import RunDirectory, read_json
from nmt.training.job import train
from nmt.translate.translator import Translator

PAIR = "the cat sees the dog in the garden .", "le chat voit le chien dans le jardin ."


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return script("faithfulness")


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


def test_masking_the_token_that_decides_collapses_the_probability_at_once(
    module: ModuleType, translator: Translator
) -> None:
    right, wrong = (module.measure_pair(decided(translator, 3, looks_at), *PAIR, 1) for looks_at in (3, 1))
    for curves in (right.curves["attention"], right.curves["saliency"], wrong.curves["saliency"]):
        assert (curves[:, 1:] < 0.02).all()
        np.testing.assert_allclose(module.areas(curves), 1 / (2 * module.MASKS), atol=0.02)
    for curves in (wrong.curves["attention"], wrong.curves["random"]):
        assert (module.areas(curves) >= 1 / (2 * module.MASKS)).all()
        assert (module.areas(curves) <= 1).all()
        assert module.areas(curves).mean() > 0.3
    assert (wrong.curves["attention"][:, 1] == 1).all()
    np.testing.assert_allclose(right.curves["random"], wrong.curves["random"])
    assert right.tau is not None
    assert wrong.tau is not None
    positions = len(translator.encode([PAIR[0]])[0][0])
    np.testing.assert_allclose(right.tau, 1)
    np.testing.assert_allclose(wrong.tau, -1 / (positions - 1))


def test_aer_by_each_view_is_that_of_its_links(module: ModuleType, translator: Translator) -> None:
    made = decided(translator, 0, 1)  # "the" decides, but the model attends to the next piece
    links = module.measure_pair(made, *PAIR, 1).links
    assert links["saliency"] == {(0, j) for j in range(9)}
    figures = module.faithfulness(made, [PAIR[0]], [PAIR[1]], ["0-0 0-1 1-1 0p3"], 5)
    # Of 9 links proposed, 2 are sure and 3 possible; gold has 3 sure links.
    assert figures["aer_saliency"] == pytest.approx(100 * (1 - (2 + 3) / (9 + 3)))
    assert module.faithfulness(made, [PAIR[0]], [PAIR[1]], None, 5)["aer_saliency"] is None


def test_curves_are_those_of_each_mask_by_itself(
    module: ModuleType, translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks the first source tokens one after the other, which then are not copied either. Decodes once per mask, while
    the script decodes in batches of few tokens, after another pair."""
    translator.model.double()
    monkeypatch.setattr(module, "TOKENS", 40)
    monkeypatch.setattr(explanation, "COPIES", 3)
    module.measure_pair(translator, PAIR[0], "le chien dort .", 1)
    first = lambda weights, random: np.tile(np.arange(module.MASKS), (len(weights), 1))  # noqa: E731
    monkeypatch.setattr(module, "masking_order", first)
    found = module.measure_pair(translator, *PAIR, 1)
    model, tokenizers = translator.single, translator.tokenizers
    source, target = (torch.tensor(side.encode([text])) for side, text in zip(tokenizers, PAIR, strict=True))
    started = torch.cat([torch.tensor([[tokenizers.target.bos]]), target[:, :-1]], 1)
    log_probs = []
    with torch.no_grad():
        for masks in range(module.MASKS + 1):
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


def test_runs_become_a_table_and_a_file(
    module: ModuleType,
    copying: Path,  # noqa: F811
    blind: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["faithfulness", str(copying), str(blind), "--output", str(output)])
    assert module.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    attends, none = json.loads(output.read_text())["runs"]
    recorded = read_json(RunDirectory(copying).results)["test"]
    assert attends["sentences"] == recorded["sentences"] == 8
    assert attends["aer_attention"] == pytest.approx(100 * recorded["aer"], abs=0.01)
    assert -1 <= attends["tau"] <= 1
    assert [key for key, value in attends.items() if value is None] == []
    assert [key for key, value in none.items() if value is None] == ["tau", "aer_attention", "area_attention"]
    for order, curve in attends["curves"].items():
        assert len(curve) == module.MASKS + 1
        assert module.areas(np.array([curve]))[0] == pytest.approx(attends[f"area_{order}"])
    monkeypatch.setattr(sys, "argv", ["faithfulness", str(tmp_path / "nowhere")])
    assert module.main() == 2


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml")))
def test_every_preset_has_figures(module: ModuleType, preset: str, tmp_path: Path) -> None:
    assert train(tiny_config(f"attention={preset}", "training.max_steps=1"), tmp_path / "run") == 0
    run, translator = RunDirectory(tmp_path / "run"), Translator.load(tmp_path / "run")
    figures = module.faithfulness(translator, *run.held_out("test"), 2)
    known = {key for key, value in figures.items() if value is not None}
    assert {"aer_saliency", "area_saliency", "area_random"} <= known
    assert ("area_attention" in known) == translator.model.attends


def test_equal_weights_have_no_ranking(module: ModuleType) -> None:
    first, second = np.array([[1, 2, 3], [3, 2, 1], [1, 1, 1]]), np.array([[2, 4, 6], [1, 2, 3], [1, 2, 3]])
    np.testing.assert_equal(module.kendall_tau(first, second), [1, -1, np.nan])


def test_tokens_are_masked_by_falling_weight_and_equal_ones_at_random(module: ModuleType) -> None:
    weights = np.array([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    random = np.array([[0.1, 0.2, 0.3], [0.9, 0.5, 0.2], [0.9, 0.1, 0.2]])
    assert module.masking_order(weights, random).tolist() == [[1, 2, 0], [1, 2, 0], [1, 2, 0]]
    assert module.masking_order(np.zeros((1, 9)), np.arange(9.0)[None, ::-1]).tolist() == [[8, 7, 6, 5, 4]]


def test_curves_start_at_one_and_stay_between_zero_and_one(module: ModuleType) -> None:
    unmasked = np.log([0.8, 0.2])
    masked = np.log([[0.4, 0.2], [0.6, 0.1]])
    curves = module.masking_curves(masked, unmasked)
    np.testing.assert_allclose(curves, [[1, 0.5, *[0.25] * (module.MASKS - 1)], [1, 1, *[0.5] * (module.MASKS - 1)]])
    assert module.masking_curves(np.full((1, 1), -np.inf), np.zeros(1)).tolist() == [[1.0, *[0.0] * module.MASKS]]


def test_areas_lie_between_those_of_the_fastest_fall_and_of_none(module: ModuleType) -> None:
    masks = module.MASKS
    collapse, none, linear = [1.0, *[0.0] * masks], [1.0] * (masks + 1), np.linspace(1, 0, masks + 1)
    np.testing.assert_allclose(module.areas(np.array([collapse, none, linear])), [1 / (2 * masks), 1, 0.5])
    curves = np.random.default_rng(1).random((50, masks + 1))
    np.testing.assert_allclose(module.areas(curves), np.trapezoid(curves, dx=1 / masks, axis=1))
