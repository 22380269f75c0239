"""Latent alignments compared with enumeration, Bayes' rule and plain loops in float64; gradients of mixtures."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_models import (
    COPYING,
    FIRST_ORDER,
    LATENT,
    LENGTHS,
    LIKELIHOOD,
    MARGINAL,
    MOCHA,
    PAD,
    POSTERIOR,
    SOURCE,
    TARGET,
    VARIATIONAL,
    attention,
    label,
    logits_of,
    model_of,
    read_out,
    slope_equals_difference,
)
from torch import Tensor

from nmt.attention.attention import Steering
from nmt.model.latent import LatentPosition
from nmt.model.seq2seq import Seq2Seq
from nmt.training.losses import divergence, likelihood

EXACT = {"rtol": 1e-10, "atol": 1e-10}
OUT = torch.tensor([[4, 5, 6, 3], [7, 8, 9, 3], [10, 4, 12, 3]])  # the word after each word of TARGET
T, S = 4, 5
AHEAD = FIRST_ORDER | {"monotonic": True}
EXACT_SUM = POSTERIOR | {"prior_share": 0.0}


def word_probs(model: Seq2Seq, sentence: int) -> tuple[Tensor, Tensor]:
    """Compute p(y_t | h_s) and the energies, both (T, S), position by position. The decoder must have no input feeding:
    it reads only the previous words."""
    one, length = slice(sentence, sentence + 1), int(LENGTHS[sentence])
    state = model.encode(SOURCE[one, :length], LENGTHS[one])
    memory = state.attended_source().memory
    words = model.target_embedding(TARGET[one])
    hidden, _ = model.decoder.rnn(words, torch.stack(state.hypothesis.recurrent.hidden))
    probs = torch.zeros(T, length, dtype=torch.float64)
    for t, s in itertools.product(range(T), range(length)):
        readout = read_out(model, hidden[0, t], memory.values[0, s], words[0, t])
        probs[t, s] = model.output(readout).softmax(-1)[OUT[sentence, t]]
    energies = model.decoder.attention.score(hidden, memory.keys)[0]
    return probs, energies


def transitions(model: Seq2Seq, energies: Tensor, monotonic: bool) -> Tensor:
    """Compute the transitions p(s | s') of a step: energies (S,) -> (S', S), s' being the previous position."""
    bias, reach = model.decoder.attention.normalizer.bias, 2
    rows = []
    for before in range(len(energies)):
        logits = energies.clone()
        for s in range(len(energies)):
            distance = s - before
            if abs(distance) <= reach and not (monotonic and distance < 0):
                logits[s] = logits[s] + bias[distance + (0 if monotonic else reach)]
            if monotonic and distance < 0:
                logits[s] = -torch.inf
        rows.append(logits.softmax(-1))
    return torch.stack(rows)


def model_of_chain(kind: str) -> Seq2Seq:
    """Make a model whose positions are independent (kind "marginal") or a Markov chain ("free", "monotonic")."""
    if kind == "marginal":
        return model_of(attention=attention("general", alignment=MARGINAL))
    normalizer = AHEAD if kind == "monotonic" else FIRST_ORDER
    model = model_of(attention=attention("general", alignment=EXACT_SUM, normalizer=normalizer))
    model.decoder.attention.normalizer.bias.data.normal_()
    return model


def paths(model: Seq2Seq, kind: str, sentence: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield all S^T alignments, each with its joint probability with the words."""
    probs, energies = word_probs(model, sentence)
    length = probs.shape[1]
    first = energies[0].softmax(-1)
    moves = [energies[t].softmax(-1).expand(length, -1) for t in range(T)]
    if kind != "marginal":
        moves = [transitions(model, energies[t], kind == "monotonic") for t in range(T)]
    for path in itertools.product(range(length), repeat=T):
        joint = first[path[0]] * probs[0, path[0]]
        for t in range(1, T):
            joint = joint * moves[t][path[t - 1], path[t]] * probs[t, path[t]]
        yield path, float(joint)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["marginal", "free", "monotonic"])
def test_the_likelihood_is_the_sum_over_all_alignments(kind: str) -> None:
    """Tests Wu and Cotterell 2019, eq. 1."""
    model = model_of_chain(kind)
    log_probs = model.log_probs(model(SOURCE, LENGTHS, TARGET).prediction, OUT, PAD)
    for sentence in range(len(LENGTHS)):
        total = sum(joint for _, joint in paths(model, kind, sentence))
        assert float(log_probs[sentence].sum().exp()) == pytest.approx(total, rel=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["free", "monotonic"])
def test_a_chain_aligns_by_its_posterior_given_all_tokens(kind: str) -> None:
    model = model_of_chain(kind)
    weights = model.force(SOURCE, LENGTHS, TARGET, OUT, PAD).weights
    longer = [torch.cat([each, torch.full((3, 2), PAD)], dim=1) for each in (TARGET, OUT)]
    padded = model.force(SOURCE, LENGTHS, *longer, PAD).weights
    torch.testing.assert_close(padded[:, :T], weights, **EXACT)
    for sentence, length in enumerate(LENGTHS.tolist()):
        expected = torch.zeros(T, length).double()
        for path, joint in paths(model, kind, sentence):
            expected[range(T), path] += joint
        expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights[sentence, :, :length], expected, **EXACT)
        assert not weights[sentence, :, length:].any()


@torch.no_grad()
@pytest.mark.parametrize("case", ["prior", "coverage", "feeding", "steered"])
def test_what_is_no_chain_aligns_by_the_posterior_of_each_step(case: str) -> None:
    alignment = POSTERIOR if case == "prior" else EXACT_SUM
    coverage = {"kind": "linear", "loss_weight": 0.0, "loss_start": 0} if case == "coverage" else {"kind": "none"}
    kind = attention("general", normalizer=FIRST_ORDER, alignment=alignment, coverage=coverage)
    model = model_of(attention=kind, decoder__input_feeding=case == "feeding")
    model.decoder.attention.normalizer.bias.data.normal_()
    steering = None
    if case == "steered":
        steering = Steering(torch.full((3, T, S), 0.2).double(), torch.ones(3, T, dtype=torch.bool))
    state = model.encode(SOURCE, LENGTHS)
    decoded = model.decode(TARGET, state if steering is None else state.steered(steering))
    mixture = decoded.prediction
    log_probs = torch.zeros(3, T, S).double()
    for b, t, s in itertools.product(range(3), range(T), range(S)):
        log_probs[b, t, s] = model.output(mixture.readouts[b, t, s]).log_softmax(-1)[OUT[b, t]]
    weights = model.force(SOURCE, LENGTHS, TARGET, OUT, PAD, steering).weights
    torch.testing.assert_close(weights, mixture.posterior(log_probs), **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_decoder_is_fed_the_posterior_mean(share: float) -> None:
    """Compares with a plain loop over Shankar and Sarawagi 2019, eq. 11 to 13."""
    alignment = POSTERIOR | {"prior_share": share}
    model = model_of(attention=attention("dot", alignment=alignment), decoder__input_feeding=True)
    found = logits_of(model, model(SOURCE, LENGTHS, TARGET))
    for sentence, length in enumerate(LENGTHS.tolist()):
        one = slice(sentence, sentence + 1)
        state = model.encode(SOURCE[one, :length], LENGTHS[one])
        values, hidden = state.attended_source().memory.values[0], state.hypothesis.recurrent.hidden[0]
        feed = torch.zeros(1, 6, dtype=torch.float64)
        for t in range(T):
            word = model.target_embedding(TARGET[one, t])
            outputs, hidden = model.decoder.rnn(torch.cat([word, feed], dim=-1)[:, None], hidden.view(1, 1, -1))
            query = outputs[0, 0]
            prior = (values @ query).softmax(0)
            readouts = torch.stack([read_out(model, query, value, word[0]) for value in values])
            probs = model.output(readouts).softmax(-1)
            mixture = prior @ probs
            torch.testing.assert_close(found[sentence, t], mixture.log(), **EXACT)
            posterior = prior * probs[:, OUT[sentence, t]]
            posterior = (1 - share) * posterior / posterior.sum() + share * prior
            feed = read_out(model, query, posterior @ values, word[0])[None]


def test_the_bound_falls_short_of_the_likelihood_by_the_divergence_from_the_posterior() -> None:
    """Computes each term of log p(y_t) = ELBO + KL(q || p(s | y_t)) by itself."""
    model = model_of(attention=attention("general", alignment=VARIATIONAL))
    model.return_log_weights()
    decoded = model(SOURCE, LENGTHS, TARGET, target_out=OUT)
    expected_loss = decoded.prediction.loss(
        model.output.layer(), OUT, PAD, lambda *each: likelihood(*each, smoothing=0.0)
    ).total
    log_q = decoded.inferred.log_probs
    bound = -expected_loss - divergence(log_q, decoded.attention.log_weights, OUT != PAD)
    plain = model(SOURCE, LENGTHS, TARGET)
    exact = model.log_probs(plain.prediction, OUT, PAD).sum()
    gap, naive = torch.zeros(()).double(), torch.zeros(()).double()
    for sentence, length in enumerate(LENGTHS.tolist()):
        probs, energies = word_probs(model, sentence)
        prior = energies.softmax(-1)
        posterior = prior * probs / (prior * probs).sum(-1, keepdim=True)
        q = log_q[sentence, :, :length].exp()
        torch.testing.assert_close(q.sum(-1), torch.ones(T).double(), **EXACT)
        gap += (q * (q / posterior).log()).sum()
        naive += (q * (probs * prior / q).log()).sum()
    torch.testing.assert_close(bound, naive, **EXACT)
    torch.testing.assert_close(exact - bound, gap, **EXACT)
    assert gap > 0


def test_the_inference_network_reads_the_whole_target_and_no_padding() -> None:
    model = model_of(attention=attention("general", alignment=VARIATIONAL))
    last = OUT.clone()
    last[:, 3] = 5
    one, other = (model(SOURCE, LENGTHS, TARGET, target_out=out).inferred.log_probs for out in (OUT, last))
    assert not torch.allclose(one[:, 0, :2], other[:, 0, :2])
    longer = torch.cat([OUT, torch.full((3, 2), PAD)], dim=1)
    inputs = torch.cat([TARGET, torch.full((3, 2), PAD)], dim=1)
    padded = model(SOURCE, LENGTHS, inputs, target_out=longer).inferred.log_probs[:, :T]
    torch.testing.assert_close(padded.exp(), one.exp(), **EXACT)


SMOOTH = [each for each in COPYING if each["attention"]["normalizer"] != MOCHA]  # whose hard stops have no gradient


@pytest.mark.parametrize("changes", [*LATENT, *SMOOTH], ids=label)
def test_gradients_equal_differences(changes: dict[str, Any]) -> None:
    """Tests mixtures, posteriors, inference networks and copying."""
    model = model_of(**changes)
    model.return_log_weights()

    def loss() -> Tensor:
        decoded = model(SOURCE, LENGTHS, TARGET, target_out=OUT)
        total = decoded.prediction.loss(model.output.layer(), OUT, PAD, LIKELIHOOD).total
        if decoded.inferred is None:
            return total
        return total + divergence(decoded.inferred.log_probs, decoded.attention.log_weights, OUT != PAD)

    slope_equals_difference(model, loss)


def test_the_strongest_positions_share_all_weight() -> None:
    weights = torch.tensor([[[0.5, 0.004, 0.1, 0.396]], [[0.0, 0.0, 0.0, 0.0]]])
    chosen, positions = LatentPosition(2).strongest(weights)
    assert positions[0, 0].tolist() == [0, 3]
    torch.testing.assert_close(chosen[0, 0], torch.tensor([0.5, 0.396]) / 0.896)
    assert not chosen[1].any()
    chosen, positions = LatentPosition(None, min_share=0.01).strongest(weights)
    assert positions is None
    torch.testing.assert_close(chosen[0, 0], torch.tensor([0.5, 0.0, 0.1, 0.396]) / 0.996)
    assert LatentPosition(None).strongest(weights)[0] is weights
    assert LatentPosition(7).strongest(weights)[1] is None
