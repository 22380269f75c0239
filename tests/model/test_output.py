"""Copying compared with its formula in float64 NumPy, for attentions of every kind."""

from typing import Any

import numpy as np
import pytest
import torch
from small_models import COPYING, EOS, LENGTHS, PAD, SOURCE, TARGET, V, attention, label, model_of, prepared
from torch import Tensor

from nmt.model.output import NEVER, copyable
from nmt.model.seq2seq import Seq2Seq

EXACT = {"rtol": 1e-10, "atol": 1e-10}
OUT = torch.tensor([[4, 5, 6, 3], [8, 8, 9, 3], [10, 4, 12, 3]])  # the word after each word of TARGET
REPEATED = torch.tensor([[4, 5, 4, 4, EOS], [8, EOS, PAD, PAD, PAD], [9, 9, 11, EOS, PAD]])
DOT = {"decoder__copy": True, "attention": attention("dot")}


def probabilities(model: Seq2Seq, source: Tensor) -> np.ndarray:
    """Compute the model's distributions (B, T, V) from readouts and weights, word by word."""
    gate, output = model.decoder.copy, model.output
    assert gate is not None
    decoded = model(source, LENGTHS, TARGET)
    logits = output(decoded.readouts).numpy()
    r, a = decoded.readouts.numpy(), decoded.weights.numpy()
    v, b = gate.proj.weight[0].numpy(), gate.proj.bias.item()
    probs = np.zeros((*TARGET.shape, V))
    for i, t in np.ndindex(*TARGET.shape):
        g = 1 / (1 + np.exp(-(v @ r[i, t] + b)))
        vocabulary = np.exp(logits[i, t]) / np.exp(logits[i, t]).sum()
        words = range(int(LENGTHS[i]) - 1)  # positions of all source tokens but </s>
        for s in words:
            probs[i, t, source[i, s]] += (1 - g) * a[i, t, s]
        probs[i, t] += vocabulary * (g + (1 - g) * (1 - sum(a[i, t, s] for s in words)))
    return probs


@torch.no_grad()
@pytest.mark.parametrize("source", [SOURCE, REPEATED], ids=["different", "repeated"])
@pytest.mark.parametrize("changes", COPYING, ids=label)
def test_predictions_equal_the_formula(changes: dict[str, Any], source: Tensor) -> None:
    model = model_of(**changes)
    model.decoder.copy.proj.bias.fill_(0.3)
    predictions = model(source, LENGTHS, TARGET).prediction
    expected = probabilities(model, source)
    np.testing.assert_allclose(expected.sum(-1), 1, rtol=1e-10)
    np.testing.assert_allclose(predictions.logits(model.output.layer()).exp(), expected, rtol=1e-10)
    chosen = np.take_along_axis(np.log(expected), OUT.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(model.log_probs(predictions, OUT, PAD), chosen, rtol=1e-10)
    forced = model.force(source, LENGTHS, TARGET, OUT, PAD)
    np.testing.assert_allclose(forced.log_probs, chosen, rtol=1e-10)


def test_neither_the_end_nor_what_may_not_be_copied_is_copyable() -> None:
    found = copyable(torch.tensor([[4, NEVER, 12, EOS]]), torch.ones(1, 4, dtype=torch.bool))
    assert found.tolist() == [[4, NEVER, 12, NEVER]]


@torch.no_grad()
def test_a_search_copies_within_its_vocabulary() -> None:
    """A search with a vocabulary neither generates nor copies tokens outside it, and normalises over its tokens."""
    model, vocabulary = model_of(**DOT), torch.tensor([0, 1, 2, 3, 4, 6, 7, 10])
    searched = prepared(model, 2)
    step = searched.step(torch.tensor([2, 2, 2]), searched.encode(SOURCE, LENGTHS, vocabulary))
    decoded = model(SOURCE, LENGTHS, TARGET[:, :1])
    logits, shares = model.output(decoded.readouts)[:, 0], decoded.prediction.shares[:, 0]
    for row, length in enumerate(LENGTHS.tolist()):
        copied = {int(SOURCE[row, s]): shares[row, 1 + s] for s in range(length - 1)}
        kept = {token: share for token, share in copied.items() if token in vocabulary.tolist()}
        expected = logits[row, vocabulary].softmax(-1) * (1 - sum(kept.values()))
        for token, share in kept.items():
            expected[vocabulary.tolist().index(token)] += share
        torch.testing.assert_close(step.logits[row].exp(), expected, **EXACT)
