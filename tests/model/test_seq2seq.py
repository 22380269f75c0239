"""Laws of the whole model, for combinations of its components."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import (
    BOS,
    COMBINATIONS,
    COVERAGE,
    EOS,
    EVERY,
    FERTILITY,
    LENGTHS,
    LIKELIHOOD,
    MOCHA,
    PAD,
    SELF_ATTENTION,
    SOURCE,
    TARGET,
    VALID,
    attention,
    label,
    logits_of,
    model_of,
    prepared,
)
from torch import Tensor

from nmt.model.seq2seq import Seq2Seq
from nmt.translate.beam import beam_search
from nmt.translate.search import Limits, SearchBatch, Symbols
from nmt.translate.search_model import SearchModel
from nmt.translate.selection import Scorer, Selection

SYMBOLS, CPU = Symbols(BOS, EOS, (PAD, BOS)), torch.device("cpu")
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("score", ["additive", "dot", "normed_additive"])
def test_gradients_of_inputs_leave_nothing_in_those_of_parameters(score: str) -> None:
    """With respect to the embedded source, torch.autograd.grad reaches the uses of shared parameters alone."""
    runs: list[dict[str, Tensor]] = []
    model = model_of(attention=attention(score), decoder__attend="before")
    for partial in (False, True):
        embedded = model.source_embedding(SOURCE).detach().requires_grad_()
        decoded = model.decode(TARGET, model.encode(SOURCE, LENGTHS, embedded))
        loss = logits_of(model, decoded).log_softmax(-1)[..., 4].sum()
        if partial:
            torch.autograd.grad(loss, embedded, retain_graph=True)
        model.zero_grad()
        loss.backward()
        runs.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    for name, gradient in runs[0].items():
        assert torch.equal(runs[1][name], gradient), name


@pytest.mark.parametrize("changes", EVERY, ids=label)
def test_laws(changes: dict[str, Any]) -> None:
    """Checks all laws of one model together, with one forward pass over a batch."""
    model = model_of(**changes)
    with torch.no_grad():
        decoded = model(SOURCE, LENGTHS, TARGET)
        logits = logits_of(model, decoded)
        for hypotheses in (1, 2):  # two hypotheses share a memory that is already multiplied
            steps_go_where_teacher_forcing_goes(prepared(model, hypotheses), decoded.weights, logits)
        padding_and_batch_mates_change_nothing(model, logits)
        a_word_depends_on_the_words_before_it_alone(model, logits)
    every_parameter_takes_part(model)


def steps_go_where_teacher_forcing_goes(model: SearchModel, weights: Tensor | None, logits: Tensor) -> None:
    state = model.encode(SOURCE, LENGTHS)
    for t in range(TARGET.shape[1]):
        step = model.step(TARGET[:, t], state)
        torch.testing.assert_close(step.logits, logits[:, t], **EXACT)
        if weights is not None:
            torch.testing.assert_close(step.weights, weights[:, t], **EXACT)
        state = step.state


def padding_and_batch_mates_change_nothing(model: Seq2Seq, together: Tensor) -> None:
    for row, length in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1)
        alone = logits_of(model, model(SOURCE[one, :length], LENGTHS[one], TARGET[one]))
        torch.testing.assert_close(alone[0], together[row], **EXACT)
    wide = torch.full((3, 9), 12)
    wide[:, :5] = torch.where(SOURCE == PAD, 12, SOURCE)  # padding replaced by a word
    torch.testing.assert_close(logits_of(model, model(wide, LENGTHS, TARGET)), together, **EXACT)


def a_word_depends_on_the_words_before_it_alone(model: Seq2Seq, before: Tensor) -> None:
    changed = TARGET.clone()
    changed[:, 2] = 5
    after = logits_of(model, model(SOURCE, LENGTHS, changed))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def every_parameter_takes_part(model: Seq2Seq) -> None:
    """Every parameter gets a gradient, so nothing is built that the model does not use."""
    model.train()
    decoded = model(SOURCE, LENGTHS, TARGET, target_out=TARGET)
    decoded.prediction.loss(model.output.layer(), TARGET, PAD, LIKELIHOOD).total.backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


@torch.no_grad()
@pytest.mark.parametrize("changes", COMBINATIONS[::9], ids=label)
def test_beams(changes: dict[str, Any]) -> None:
    """Hypotheses that share their sentence's memory give the same beams as copies of it, with the right attention."""
    model = model_of(**changes)
    searched = prepared(model, 3)
    state, limits, penalty = searched.encode(SOURCE, LENGTHS), Limits(1, [9, 3, 6]), Scorer("average", 1.0)
    batch = SearchBatch(searched.step, state, SYMBOLS, limits, CPU)
    copies = SearchBatch(searched.step, state._replace(shares_source=False), SYMBOLS, limits, CPU)
    results = [beam_search(each, Selection(3, EOS), 3, scorer=penalty) for each in (batch, copies)]
    for row, (shared, copied) in enumerate(zip(*results, strict=True)):
        assert [each.tokens for each in shared] == [each.tokens for each in copied]
        for ours, theirs in zip(shared, copied, strict=True):
            assert ours.score == pytest.approx(theirs.score, abs=1e-5)
            one, target = slice(row, row + 1), torch.tensor([[BOS, *ours.tokens[:-1]]])
            decoded = model(SOURCE[one], LENGTHS[one], target)
            log_probs = logits_of(model, decoded)[0].log_softmax(-1)
            forced = log_probs.gather(1, torch.tensor(ours.tokens)[:, None]).sum()
            assert ours.log_prob == pytest.approx(float(forced), abs=1e-4)
            assert (ours.attention is None) == (decoded.weights is None)
            if ours.attention is not None and decoded.weights is not None:
                torch.testing.assert_close(ours.attention.double(), decoded.weights[0], rtol=1e-4, atol=1e-5)


def test_beams_share_their_sentence_unless_the_attention_reads_the_past() -> None:
    for each in (attention("additive"), attention("additive", window={"kind": "local_m", "reach": 1})):
        assert model_of(attention=each).encode(SOURCE, LENGTHS).shares_source
    for each in (
        attention("location_aware"),
        attention("additive", coverage=COVERAGE),
        attention("dot", normalizer=FERTILITY),
        attention("normed_additive", normalizer=MOCHA),
        attention("gaussian_mixture"),
    ):
        assert not model_of(attention=each).encode(SOURCE, LENGTHS).shares_source


@pytest.mark.parametrize("kind", [attention("dot"), attention("dot", projection=SELF_ATTENTION["projection"])])
@pytest.mark.parametrize("feeding", [False, True])
def test_the_lexical_model_adds_what_the_attended_words_say(feeding: bool, kind: dict[str, Any]) -> None:
    """Adds tanh(W f + b) + f with f = tanh(sum a_s e_s); input feeding passes on the readout without this term."""
    model = model_of(decoder__lexical=True, decoder__input_feeding=feeding, attention=kind)
    lexical, decoder = model.decoder.lexical, model.decoder
    assert lexical is not None
    with_words = model(SOURCE, LENGTHS, TARGET)
    decoder.lexical = None
    without = model(SOURCE, LENGTHS, TARGET)
    assert without.weights is not None
    assert torch.equal(with_words.weights, without.weights)
    words = model.source_embedding(SOURCE)
    f = torch.tanh(torch.einsum("bts,bse->bte", without.weights, words))
    said = torch.tanh(f @ lexical.proj.weight.T + lexical.proj.bias) + f
    torch.testing.assert_close(with_words.readouts - without.readouts, said)


def test_with_fixnorm_a_logit_is_a_scaled_cosine() -> None:
    """The norms of word vectors and readouts change nothing. The scale is sqrt(R) before training."""
    model = model_of(decoder__fixnorm=True, embedding__tie_output=False)
    output = model.output
    output.bias.data.normal_()
    readouts = model(SOURCE, LENGTHS, TARGET).readouts
    cosine = F.cosine_similarity(readouts[..., None, :], output.weight, dim=-1)
    torch.testing.assert_close(output(readouts), 6**0.5 * cosine + output.bias)
    before = output(readouts)
    output.weight.data[4] *= 3
    torch.testing.assert_close(output(7 * readouts), before)
    assert output.scale is not None
    output.scale.data *= 2
    torch.testing.assert_close(output(readouts) - output.bias, 2 * (before - output.bias))
    assert model_of().output.scale is None


def test_the_bridge_reads_the_final_or_the_mean_state() -> None:
    model, mean = model_of(), model_of(decoder__bridge="mean")
    embedded = model.source_embedding(SOURCE[:1])
    states, summary, *_ = model.encoder(embedded, LENGTHS[:1])
    torch.testing.assert_close(summary[0], torch.cat([states[0, -1, :4], states[0, 0, 4:]]))
    states, summary, *_ = mean.encoder(mean.source_embedding(SOURCE), LENGTHS)
    torch.testing.assert_close(summary[1], states[1, :2].mean(0))


@pytest.mark.parametrize("part", ["encoder", "decoder", "embedding"])
@pytest.mark.parametrize("feeding", [False, True])
def test_dropout_acts_in_training_only(part: str, feeding: bool) -> None:
    model = model_of(decoder__input_feeding=feeding, **{f"{part}__dropout": 0.5})
    assert torch.equal(model(SOURCE, LENGTHS, TARGET).readouts, model(SOURCE, LENGTHS, TARGET).readouts)
    model.train()
    torch.manual_seed(1)
    one, other = model(SOURCE, LENGTHS, TARGET).readouts, model(SOURCE, LENGTHS, TARGET).readouts
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    assert torch.equal(model(SOURCE, LENGTHS, TARGET).readouts, one)


def test_word_dropout_takes_whole_words_one_by_one() -> None:
    model = model_of(embedding__word_dropout=0.4).train()
    words = torch.ones(60, 9, 6).double()
    dropped = model.dropout(words)
    gone = (dropped == 0).all(-1)
    torch.testing.assert_close(dropped, torch.where(gone[..., None], 0.0, words / 0.6))
    assert abs(gone.double().mean() - 0.4) < 0.11  # within 5 standard deviations
    assert model.eval().dropout(words) is words


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_an_encoder_may_read_in_both_directions_in_its_first_layer_only(cell: str) -> None:
    """Equals torch's modules one after another, with residual connections from layer 3 on (Wu et al. 2016)."""
    changes = {"cell": cell, "bidirectional": "first", "layers": 4, "residual": 3, "hidden": 8, "dropout": 0.3}
    model = model_of(**{f"encoder__{name}": value for name, value in changes.items()})
    embedded, encoder = model.source_embedding(SOURCE), model.encoder
    # Dropout is between the layers: cuDNN would prepare random numbers for that of a single layer, in vain.
    assert all(rnn.dropout == 0 for rnn in (encoder.rnn, *encoder.upper.layers))
    states, summary, *_ = encoder(embedded, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        below, _ = encoder.rnn(embedded[row : row + 1, :length])
        for number, layer in enumerate(encoder.upper.layers, 2):
            own, final = layer(below)
            below = below + own if number >= 3 else own
        torch.testing.assert_close(states[row, :length], below[0])
        assert not states[row, length:].any()
        last = torch.cat([below[0, -1], final[1][0, 0]]) if cell == "lstm" else below[0, -1]
        torch.testing.assert_close(summary[row], last)


def test_self_attention_is_a_normed_residual_of_the_states() -> None:
    model = model_of(encoder__self_attention=SELF_ATTENTION)
    layers = model.encoder.self_attention
    assert len(layers) == 2
    states = model.encoder(model.source_embedding(SOURCE), LENGTHS).states
    assert (states[~VALID] == 0).all()
    plain = model_of()
    plain.load_state_dict(model.state_dict(), strict=False)
    expected = plain.encoder(plain.source_embedding(SOURCE), LENGTHS).states
    for layer in layers:
        attended = layer.attention.sequence(expected, layer.attention.remember(expected, VALID))
        expected = layer.norm(expected + attended.context) * VALID[:, :, None]
    torch.testing.assert_close(states, expected)
