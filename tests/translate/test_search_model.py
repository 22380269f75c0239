"""A model prepared for search gives the same results as the model itself. (More in tests/model/test_seq2seq.py.)"""

from typing import Any

import pytest
import torch
from conftest import tiny_config
from small_models import COMBINATIONS, LENGTHS, PAD, SOURCE, TARGET, V, attention, label, logits_of, model_of, prepared
from torch import Tensor

from nmt.config.checks import config_dir
from nmt.model.build import build_model
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.products import FloatWeight, pack
from nmt.translate import search_model
from nmt.translate.search_model import SearchModel

PRESETS = sorted(path.stem for path in (config_dir() / "attention").glob("*.yaml"))


def steps_equal_teacher_forcing(model: Seq2Seq, hypotheses: int) -> None:
    searched, decoded = prepared(model, hypotheses), model(SOURCE, LENGTHS, TARGET)
    state, expected = searched.encode(SOURCE, LENGTHS), logits_of(model, decoded)
    for t in range(TARGET.shape[1]):
        step = searched.step(TARGET[:, t], state)
        torch.testing.assert_close(step.logits, expected[:, t], rtol=1e-10, atol=1e-10)
        state = step.state


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_of_every_preset_equal_teacher_forcing(preset: str) -> None:
    config = tiny_config(f"attention={preset}")
    steps_equal_teacher_forcing(build_model(config, V, V, (PAD, PAD)).double().eval(), hypotheses=2)


@pytest.mark.parametrize("changes", COMBINATIONS[::11], ids=label)
def test_without_a_table_of_words(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_model, "MAX_TABLE", 0)
    steps_equal_teacher_forcing(model_of(**changes), hypotheses=1)


@pytest.mark.parametrize("changes", COMBINATIONS[::13], ids=label)
def test_a_vocabulary_leaves_the_logits_of_its_tokens(changes: dict[str, Any]) -> None:
    """A mixture or a model that copies normalises distributions over the vocabulary before it mixes them. A smaller
    vocabulary would change its logits, so it is tested with all tokens."""
    model, vocabulary = model_of(**changes), torch.tensor([0, 1, 2, 3, 4, 6, 7, 10])
    if model.decoder.sums_over_positions or model.has_copy_gate:
        vocabulary = torch.arange(V)
    searched = prepared(model, 2)
    small, all_words = (searched.encode(SOURCE, LENGTHS, words) for words in (vocabulary, torch.arange(V)))
    for words in ([2, 2, 2], [4, 6, 7], [5, 1, 4]):  # indices into the vocabulary
        positions = torch.tensor(words)
        expected, step = searched.step(vocabulary[positions], all_words), searched.step(positions, small)
        torch.testing.assert_close(step.logits, expected.logits[:, vocabulary], rtol=1e-10, atol=1e-10)
        all_words, small = expected.state, step.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_change_rounding_alone(dtype: torch.dtype) -> None:
    wide = {"embedding__dim": 64, "decoder__readout_dim": 64, "encoder__hidden": 64, "decoder__hidden": 128}
    model = model_of(attention=attention("general"), decoder__input_feeding=True, **wide).float()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16), torch.no_grad():
        packed = SearchModel(model, 2, pack)
        state = packed.encode(SOURCE, LENGTHS)
        assert isinstance(state.parameters.layers[0].weight_hh, Tensor) == (dtype not in FloatWeight.dtypes())
        step = packed.step(TARGET[:, 0], state)
    expected = logits_of(model, model(SOURCE, LENGTHS, TARGET))[:, 0]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(step.logits.float(), expected, rtol=tolerance, atol=tolerance)
