"""A model prepared for search gives the same results as the model itself."""

from typing import Any

import pytest
import torch
from conftest import TINY, values_of
from small_models import BOS, EOS, LENGTHS, PAD, SOURCE, TARGET, V, attention, model_of
from test_model import COMBINATIONS, EVERY, label
from torch import Tensor

from nmt.config.compose import config_dir, validated
from nmt.config.schema import TrainConfig
from nmt.model.build import build_model
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.packed import FloatWeight, pack
from nmt.ops.products import Weight
from nmt.translate import prepared_model as search_model
from nmt.translate.prepared_model import SearchModel
from nmt.translate.search import Limits, Symbols

SYMBOLS, LIMITS = Symbols(BOS, EOS, (PAD, BOS)), Limits(1, [9, 6, 8])
PRESETS = sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml"))
CPU = torch.device("cpu")


def unpacked(weight: Tensor, bounded: bool = False) -> Weight:
    """Return the parameter as it is, or if `bounded` as a product that checks its inputs."""
    return Bounded(weight) if bounded else weight


class Bounded:
    """A product with a parameter that asserts inputs between -1 and 1."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        assert inputs.abs().max() <= 1
        return torch.nn.functional.linear(inputs, self.weight, bias)


def assert_same_steps(changes: dict[str, Any], hypotheses: int) -> None:
    assert_equal_steps(model_of(**changes), hypotheses)


def assert_equal_steps(model: Seq2Seq, hypotheses: int) -> None:
    prepared = SearchModel(model, hypotheses, unpacked)
    own, state = model.encode(SOURCE, LENGTHS), prepared.encode(SOURCE, LENGTHS)
    for t in range(TARGET.shape[1]):
        expected, step = model.step(TARGET[:, t], own), prepared.step(TARGET[:, t], state)
        torch.testing.assert_close(step.logits, expected.logits, rtol=1e-10, atol=1e-10)
        if expected.weights is not None:
            torch.testing.assert_close(step.weights, expected.weights, rtol=1e-10, atol=1e-10)
        own, state = expected.state, step.state


@pytest.mark.parametrize("changes", EVERY, ids=label)
def test_steps_equal_the_models_own(changes: dict[str, Any]) -> None:
    assert_same_steps(changes, hypotheses=2)  # 2 hypotheses share a projected memory


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_of_every_preset_equal_the_models_own(preset: str) -> None:
    config = validated(TrainConfig, values_of("train", [*TINY, f"attention={preset}"]))
    assert_equal_steps(build_model(config, V, V, (PAD, PAD)).double().eval(), hypotheses=2)


@pytest.mark.parametrize("changes", COMBINATIONS[::11], ids=label)
def test_without_a_table_of_words(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_model, "MAX_TABLE", 0)
    assert_same_steps(changes, hypotheses=1)


@pytest.mark.parametrize("changes", COMBINATIONS[::13], ids=label)
def test_a_vocabulary_leaves_the_logits_of_its_tokens(changes: dict[str, Any]) -> None:
    """A mixture or a model that copies normalises distributions over the vocabulary before it mixes them. A smaller
    vocabulary would change its logits, so it is tested with all tokens."""
    model, vocabulary = model_of(**changes), torch.tensor([0, 1, 2, 3, 4, 6, 7, 10])
    if model.decoder.sums_over_positions or model.has_copy_gate:
        vocabulary = torch.arange(V)
    prepared = SearchModel(model, 2, unpacked)
    own, state = model.encode(SOURCE, LENGTHS), prepared.encode(SOURCE, LENGTHS, vocabulary)
    for words in ([2, 2, 2], [4, 6, 7], [5, 1, 4]):  # indices into the vocabulary
        positions = torch.tensor(words)
        expected, step = model.step(vocabulary[positions], own), prepared.step(positions, state)
        torch.testing.assert_close(step.logits, expected.logits[:, vocabulary], rtol=1e-10, atol=1e-10)
        own, state = expected.state, step.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_change_rounding_alone(dtype: torch.dtype) -> None:
    wide = {"embedding__dim": 64, "decoder__readout_dim": 64, "encoder__hidden": 64, "decoder__hidden": 128}
    model = model_of(attention=attention("general"), decoder__input_feeding=True, **wide).float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        prepared = SearchModel(model, 2, pack)
        state = prepared.encode(SOURCE, LENGTHS)
        assert isinstance(state.products.layers[0].weight_hh, Tensor) == (dtype not in FloatWeight.dtypes())
        step = prepared.step(TARGET[:, 0], state)
    expected = model.step(TARGET[:, 0], model.encode(SOURCE, LENGTHS))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(step.logits.float(), expected.logits, rtol=tolerance, atol=tolerance)
