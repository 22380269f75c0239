"""Laws of ensembles, for models that share only their vocabularies."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_models import BOS, EOS, LENGTHS, NONE, PAD, SOURCE, TARGET, attention, model_of, prepared
from torch import Tensor

from nmt.model.seq2seq import Ensemble, SearchEnsemble, Seq2Seq, log_mean
from nmt.ops.draws import sentence_keys
from nmt.translate.beam import beam_search
from nmt.translate.sampling import inverse_cdf, sample
from nmt.translate.search import Limits, SearchBatch, Symbols
from nmt.translate.selection import Scorer, Selection

SYMBOLS, LIMITS = Symbols(BOS, EOS, (PAD, BOS)), Limits(1, [9, 6, 8])
CPU = torch.device("cpu")


def members() -> list[Seq2Seq]:
    """Make four models: hypotheses share the memory of their sentence in the first but not in the second, the third
    attends with its first layer, the fourth has no attention."""
    normalizer = {"kind": "monotonic", "noise": 1.0, "initial_offset": 1.0, "outside_training": "stop"}
    monotonic = attention("normed_additive", normalizer=normalizer)
    models = [
        model_of(attention=attention("dot")),
        model_of(encoder__cell="lstm", decoder__cell="lstm", decoder__layers=2, attention=monotonic),
        model_of(decoder__attend="first_layer", decoder__layers=2, attention=attention("additive")),
        model_of(attention=NONE, encoder__hidden=7, embedding__dim=5, embedding__tie_output=False),
    ]
    with torch.no_grad():
        for parameter in (parameter for model in models for parameter in model.parameters()):
            parameter.mul_(3)  # so that the models disagree clearly
    return models


def batch_of(models: Sequence[Seq2Seq]) -> SearchBatch[Any]:
    keys, ensemble = sentence_keys([1], np.arange(len(LENGTHS))), SearchEnsemble([prepared(each, 4) for each in models])
    return SearchBatch(ensemble.step, ensemble.encode(SOURCE, LENGTHS), SYMBOLS, LIMITS, CPU, keys=lambda: keys)


def mean_probs(models: Sequence[Seq2Seq], sentence: int, prefix: list[int]) -> Tensor:
    """Average the models' next-token probabilities (V,) after a prefix, by teacher forcing of each model."""
    one, target = slice(sentence, sentence + 1), torch.tensor([[BOS, *prefix]])
    each = [model.output(model(SOURCE[one], LENGTHS[one], target).readouts[0, -1]).softmax(-1) for model in models]
    return torch.stack(each).mean(0)


@pytest.mark.parametrize("models", [1, 2, 3, 7])
def test_the_logarithm_of_the_mean_keeps_small_probabilities(models: int) -> None:
    log_probs = [200 * torch.rand(5, 11).neg() for _ in range(models)]
    exact = torch.stack(log_probs).double().logsumexp(0) - math.log(models)
    torch.testing.assert_close(log_mean(log_probs).double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(log_mean([log_probs[0]] * models), log_probs[0])


@torch.no_grad()
def test_a_step_has_the_mean_probabilities_and_the_mean_attention() -> None:
    models = members()
    searched = [prepared(model) for model in models]
    ensemble = SearchEnsemble(searched)
    state, states = ensemble.encode(SOURCE, LENGTHS), [model.encode(SOURCE, LENGTHS) for model in searched]
    for t in range(TARGET.shape[1]):
        step = ensemble.step(TARGET[:, t], state)
        steps = [model.step(TARGET[:, t], its) for model, its in zip(searched, states, strict=True)]
        probs = torch.stack([each.logits.softmax(-1) for each in steps]).mean(0)
        assert step.logits.dtype == torch.float32
        torch.testing.assert_close(step.logits.exp().double(), probs, rtol=1e-5, atol=1e-7)
        weights = torch.stack([each.weights for each in steps if each.weights is not None])
        assert len(weights) == 3
        torch.testing.assert_close(step.weights, weights.mean(0).float())
        state, states = step.state, [each.state for each in steps]


@torch.no_grad()
def test_hypotheses_are_worth_what_forced_decoding_says() -> None:
    """The states of all members follow each reordering of the beam."""
    models = members()
    ensemble = Ensemble(models)
    drawn = sample(batch_of(models), 4, lambda log_probs, uniform: inverse_cdf(log_probs, 1.0, uniform))
    for found in (beam_search(batch_of(models), Selection(4, EOS), 3, scorer=Scorer("average", 1.0)), drawn):
        assert len({tuple(each.tokens) for group in found for each in group}) > 6
        for sentence, group in enumerate(found):
            one = slice(sentence, sentence + 1)
            for each in group[:2]:
                out = torch.tensor([each.tokens])
                into = torch.tensor([[BOS, *each.tokens[:-1]]])
                forced = ensemble.force(SOURCE[one], LENGTHS[one], into, out, PAD)
                assert float(forced.log_probs.sum()) == pytest.approx(each.log_prob, abs=1e-4)
                exact = [math.log(mean_probs(models, sentence, each.tokens[:t])[y]) for t, y in enumerate(each.tokens)]
                assert forced.log_probs[0].tolist() == pytest.approx(exact, abs=1e-4)
                assert each.attention is not None
                assert forced.weights is not None
                torch.testing.assert_close(each.attention, forced.weights[0], rtol=1e-4, atol=1e-5)


def test_an_ensemble_attends_if_a_member_does() -> None:
    models = members()
    assert Ensemble(models).attends
    assert not Ensemble(models[3:] * 2).attends
    ensemble = SearchEnsemble([prepared(models[3])] * 2)
    assert ensemble.step(TARGET[:, 0], ensemble.encode(SOURCE, LENGTHS)).weights is None
