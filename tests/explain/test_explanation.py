"""Gradient saliency equals finite differences; statistics of attention weights."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_config
from trained import blind, copying  # noqa: F401

from nmt.explain.explanation import attention_statistics, explain
from nmt.training.job import train
from nmt.translate.translator import Translator

PAIR = ["the cat sleeps ."], ["le chat dort ."]


@pytest.fixture(params=["copying", "blind"])
def translator(request: pytest.FixtureRequest) -> Translator:
    loaded = Translator.load(request.getfixturevalue(request.param))
    loaded.model.double()
    return loaded


def log_probs(translator: Translator, nudge: torch.Tensor) -> np.ndarray:
    """Compute the target tokens' log-probabilities (T,) with `nudge` (S, E) added to the source embeddings."""
    model, tokenizers = translator.model, translator.tokenizers
    source = torch.tensor(tokenizers.source.encode(PAIR[0]))
    target = torch.tensor(tokenizers.target.encode(PAIR[1]))
    first = torch.tensor([[tokenizers.target.bos]])
    with torch.no_grad():
        state = model.encode(source, torch.tensor([source.shape[1]]), model.source_embedding(source) + nudge)
        decoded = model.decoder(model.target_embedding(torch.cat([first, target[:, :-1]], 1)), state)
        logits = decoded.prediction.log_probs(model.output.layer())
    return logits[0].gather(1, target.T)[:, 0].numpy()


def test_norms_are_those_of_the_numerical_jacobian(translator: Translator) -> None:
    found = explain(translator, PAIR[0][0], PAIR[1][0])
    T, S = len(found.tokens), len(found.source_tokens)
    E, step = translator.model.source_embedding.embedding_dim, 1e-6
    numerical = np.zeros((T, S, E))
    for s in range(S):
        for e in range(E):
            nudge = torch.zeros(S, E, dtype=torch.float64)
            nudge[s, e] = step
            numerical[:, s, e] = (log_probs(translator, nudge) - log_probs(translator, -nudge)) / (2 * step)
    norms = np.linalg.norm(numerical, axis=-1)
    np.testing.assert_allclose(found.saliency, norms / norms.sum(1, keepdims=True), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_run_draws_it_beside_the_alignment(tmp_path: Path) -> None:
    config = tiny_config("training.max_steps=1", "validation.saliency=true", "validation.samples=2")
    assert train(config, tmp_path / "run", []) == 0
    drawn = sorted(path.name for path in (tmp_path / "run" / "alignments" / "test").iterdir())
    assert drawn == ["1.png", "1.saliency.png", "2.png", "2.saliency.png"]


@pytest.mark.parametrize(
    ("alignments", "entropy", "on_end"),
    [
        ([np.full((3, 8), 1 / 8)], math.log(8), 1 / 8),
        ([np.eye(4)[[0, 2, 1, 3]]], 0, 1 / 4),
        ([np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]] * 3)], 0, 1 / 4),  # a mean over rows, not over sentences
        ([np.array([[0.25, 0.25], [0.0, 0.0]])], math.log(2), 1 / 2),  # rows are scaled; one without weight is left out
        ([np.zeros((2, 3))], 0, 0),
    ],
)
def test_statistics_of_attention_are_means_over_scaled_rows(
    alignments: list[np.ndarray], entropy: float, on_end: float
) -> None:
    assert attention_statistics(alignments) == pytest.approx((entropy, on_end))
