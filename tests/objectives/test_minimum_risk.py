"""Minimum risk training, on models so small that all translations can be listed."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sacrebleu import sentence_bleu
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig
from nmt.data.batching import Batch, collate
from nmt.machine import Machine
from nmt.model.build import build_model
from nmt.model.seq2seq import Seq2Seq
from nmt.objectives.minimum_risk import Candidates, expected_risk
from nmt.objectives.objective import Objective, Value
from nmt.training.step import Updater

Config = Callable[..., TrainConfig]
PAD, UNK, BOS, EOS, V = 0, 1, 2, 3, 6
TARGET = cast(Any, SimpleNamespace(pad=PAD, bos=BOS, eos=EOS, tag_ids=()))
STILL = ["embedding.dropout=0", "encoder.dropout=0", "decoder.dropout=0", "training.label_smoothing=0"]
RISK = ["objective=minimum_risk", "objective.sharpness=1", "objective.likelihood_weight=0"]
ALL = ["objective.samples=600", "objective.max_ratio=1"]  # so many draws bring every translation
REFERENCES = [[4, EOS], [5, 4, EOS], [1, EOS]]


def setup(config: TrainConfig, references: list[list[int]] = REFERENCES) -> tuple[Seq2Seq, Objective, Batch]:
    torch.manual_seed(5)
    model = build_model(config, V, V, (PAD, PAD)).double()
    sources = [[4, 5, EOS], [5, EOS], [4, 4, 1, EOS]][: len(references)]
    batch = collate(sources, references, SimpleNamespace(source=TARGET, target=TARGET), np.arange(len(sources)))  # type: ignore[arg-type]
    return model, Objective(model, config, TARGET), batch


def translations(longest: int) -> list[list[int]]:
    return [[*words, EOS] for length in range(longest) for words in itertools.product([UNK, 4, 5], repeat=length)]


def log_prob(model: Seq2Seq, batch: Batch, sentence: int, tokens: list[int]) -> Tensor:
    """Of one translation of one sentence, in a pass of its own."""
    one = slice(sentence, sentence + 1)
    length = int(batch.lengths[sentence])
    inputs = torch.tensor([[BOS, *tokens[:-1]]])
    predictions = model(batch.source[one, :length], batch.lengths[one], inputs).predictions
    found: Tensor = model.logits(predictions)[0].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum()
    return found


def risk(tokens: list[int], reference: list[int]) -> float:
    texts = (" ".join(map(str, each[:-1])) for each in (tokens, reference))
    return 1 - sentence_bleu(next(texts), [next(texts)], tokenize="none").score / 100


def gradient(model: Seq2Seq, total: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return torch.cat([cast(Tensor, parameter.grad).flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "attention",
    [
        ["attention=bahdanau"],
        ["attention=luong_dot", "decoder.fixnorm=true", "decoder.lexical=true"],
        ["attention=luong_dot", "decoder.copy=true"],
        ["attention=coverage", "attention.coverage.loss_weight=0"],
        ["attention=multihead"],
        ["attention=gnmt"],
        ["attention=none"],
        ["attention=luong_local_m"],
    ],
)
def test_with_every_translation_drawn_the_gradient_is_that_of_the_expected_risk(
    attention: list[str], train_config: Config
) -> None:
    """Each translation in a pass of its own, risks by sacreBLEU; the loss is their expectation, a sentence's mean."""
    config = train_config(*STILL, *RISK, *ALL, *attention)
    model, objective, batch = setup(config)
    value = objective(batch, 1)
    expected = torch.zeros((), dtype=torch.float64)
    for sentence, reference in enumerate(REFERENCES):
        every = translations(len(reference))
        log_probs = torch.stack([log_prob(model, batch, sentence, tokens) for tokens in every])
        risks = torch.tensor([risk(tokens, reference) for tokens in every], dtype=torch.float64)
        expected = expected + (log_probs.softmax(0) * risks).sum()
    expected = expected * batch.target_tokens / len(REFERENCES)  # the update divides by the tokens
    torch.testing.assert_close(value.total, expected)
    torch.testing.assert_close(value.terms["risk"], expected.detach())
    torch.testing.assert_close(gradient(model, value.total), gradient(model, expected))


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 3.0])
def test_the_sharpness_scales_probabilities_and_not_the_gradient(sharpness: float) -> None:
    sentences, counted = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([False, True, True, True, True])
    log_probs = torch.randn(5, dtype=torch.float64, requires_grad=True)
    risks = torch.tensor([0.9, 0.1, 0.4, 0.0, 1.0])
    found = expected_risk(log_probs, Candidates([], sentences, counted, risks), sharpness)
    powers = (sharpness * log_probs.detach()).exp()
    by_hand = (0.1 * powers[1] + 0.4 * powers[2]) / (powers[1] + powers[2]) + powers[4] / (powers[3] + powers[4])
    torch.testing.assert_close(found.detach(), by_hand)
    (slope,) = torch.autograd.grad(found / sharpness, log_probs)
    assert slope[0] == 0
    if sharpness == 0.01:  # equal weights: the difference to the mean risk
        torch.testing.assert_close(slope[1:], torch.tensor([-0.075, 0.075, -0.25, 0.25]).double(), rtol=0, atol=0.01)


def test_candidates_are_the_different_draws_of_a_sentence_behind_its_reference(
    train_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, objective, batch = setup(train_config(*STILL, *RISK, "objective.reference=false"))
    assert objective.risk is not None
    a, b, c = [4, EOS], [5, 5, EOS], [EOS]
    drawn = [[b, a, b, a], [c, b, b, c], [b, b, b, b]]
    monkeypatch.setattr(objective.risk, "_sample", lambda *_: drawn)
    found = objective.risk.candidates(batch)
    assert found.tokens == [a, b, REFERENCES[1], c, b, REFERENCES[2], b]
    assert found.sentences.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert found.counted.tolist() == [True, True, False, True, True, False, True]
    expected = [risk(tokens, REFERENCES[i]) for tokens, i in zip(found.tokens, found.sentences, strict=True)]
    assert found.risks.tolist() == pytest.approx(expected)
    objective.risk.config = train_config(*RISK).objective  # type: ignore[assignment]
    assert objective.risk.candidates(batch).counted.all()


def test_draws_come_from_the_global_generator_without_dropout_and_within_their_length(train_config: Config) -> None:
    drawn = []
    for seed, dropout in ((1, "0"), (1, "0.5"), (2, "0")):
        model, objective, batch = setup(train_config(*RISK, f"encoder.dropout={dropout}", f"decoder.dropout={dropout}"))
        assert objective.risk is not None
        torch.manual_seed(seed)
        drawn.append(objective.risk.candidates(batch).tokens)
        assert model.training
    assert drawn[0] == drawn[1] != drawn[2]
    lengths = {len(tokens) for tokens in drawn[0][:8]}
    assert max(lengths) == np.ceil(1.5 * len(REFERENCES[0]))


def test_the_likelihood_and_what_the_attention_adds_are_those_of_the_references(train_config: Config) -> None:
    """With the same terms as without a risk, which is added by its weight."""
    extra = [
        "training.label_smoothing=0.1",
        "attention=coverage",
        "decoder.copy=true",
        "attention.coverage.loss_start=0",
    ]
    weights = ["objective.likelihood_weight=0.7", "objective.sharpness=0.5"]
    values: list[Value] = []
    for overrides in ([], [*RISK, *weights]):
        _, objective, batch = setup(train_config(*STILL[:3], *extra, *overrides, "training.guided_alignment=1"))
        alignment = torch.rand(*batch.target_out.shape, batch.source.shape[1]).double()
        values.append(objective(batch._replace(alignment=alignment.softmax(-1)), 1, 7.0))
    terms = values[1].terms
    expected = 0.7 * terms["smoothed_loss"] + terms["coverage_loss"] + terms["alignment_loss"] + terms["risk"] / 0.5
    torch.testing.assert_close(values[1].total.detach(), expected)
    assert 0 < terms.pop("risk") < 7 * len(REFERENCES)
    for name in ("loss", "smoothed_loss", "coverage_loss"):
        torch.testing.assert_close(terms[name], values[0].terms[name])


def test_a_split_batch_gives_the_same_update(train_config: Config) -> None:
    """The mean over all sentences, however many tokens the parts have; all translations are drawn for each."""
    config = train_config(*STILL, *RISK, *ALL, "objective.likelihood_weight=0.5")
    moved = []
    for parts in ([REFERENCES], [REFERENCES[:1], REFERENCES[1:]]):
        model, objective, _ = setup(config)
        sources = iter([[4, 5, EOS], [5, EOS], [4, 4, 1, EOS]])
        both = SimpleNamespace(source=TARGET, target=TARGET)
        batches = [collate([next(sources) for _ in part], part, both, np.arange(len(part))) for part in parts]  # type: ignore[arg-type]
        updater = Updater(
            model, objective, torch.optim.SGD(model.parameters()), None, Machine(torch.device("cpu"), "fp32")
        )
        update = updater(batches, 1.0, 1)
        moved.append((update.terms, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])))
    torch.testing.assert_close(moved[0], moved[1])


@pytest.mark.parametrize("overrides", [["objective.sharpness=0.005"], ["objective.reference=false"]])
def test_the_risk_falls(overrides: list[str], train_config: Config) -> None:
    """From scratch, by drawing alone."""
    config = train_config(*STILL, *RISK, *overrides)
    model, objective, batch = setup(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    risks = []
    for _ in range(60):
        value = objective(batch, 1)
        optimizer.zero_grad()
        value.total.backward()
        optimizer.step()
        risks.append(float(value.terms["risk"]) / batch.target_tokens)
    assert risks[0] > 0.6
    assert np.mean(risks[-20:]) < 0.3 * risks[0]


def test_under_autocast_the_gradient_stays_near_that_in_float32(train_config: Config) -> None:
    """Draws without gradient before must not hide the weights from the pass that has one."""
    config = train_config(*STILL, *RISK, *ALL, "attention=luong_dot")
    model, objective, batch = setup(config)
    model.float()
    exact = gradient(model, objective(batch, 1).total)
    with torch.autocast("cpu", torch.bfloat16):
        total = objective(batch, 1).total
    rough = gradient(model, total)
    assert (rough - exact).norm() < 0.1 * exact.norm()


def test_under_autocast_draws_leave_no_copies_of_weights(train_config: Config) -> None:
    """They would have no gradient (pytorch issue 65766)."""
    model, objective, batch = setup(train_config(*STILL, *RISK, *ALL))
    model.float()
    assert objective.risk is not None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        objective.risk.candidates(batch)
        model.bridge.proj.weight.zero_()
        first = model.encode(batch.source, batch.lengths).cell.hidden[0]
    torch.testing.assert_close(first.float(), model.bridge.proj.bias.tanh().expand_as(first), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention=hard"], r"minimum_risk gives no reward to the positions .*; use objective=likelihood"),
        (["training.r_drop=5"], r"training\.r_drop=5\.0 is for objective=likelihood; .* set it to 0"),
        (["objective.samples=1", "objective.reference=false"], r"objective: samples=1 leaves one candidate"),
        (["tokenizer.sampling=0.1"], r"tokenizer\.sampling=0\.1 samples segmentations of references"),
        (
            ["tokenizer.sampling=0.1", "tokenizer.sampling_sides=target"],
            r"use tokenizer\.sampling_sides=source, or set it to 0",
        ),
    ],
)
def test_what_it_cannot_be_joined_with_is_refused(overrides: list[str], message: str, train_config: Config) -> None:
    with pytest.raises(UserError, match=message):
        train_config(*RISK, *overrides)


def test_of_the_source_other_pieces_may_be_drawn(train_config: Config) -> None:
    assert train_config(*RISK, "tokenizer.sampling=0.1", "tokenizer.sampling_sides=source").tokenizer.sampling == 0.1
