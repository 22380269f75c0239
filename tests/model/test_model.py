"""Laws of the whole model, over the product of its parts."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import slow_but_pairwise
from small_models import (
    BOS,
    CHO,
    EOS,
    LENGTHS,
    LIKELIHOOD,
    MARGINAL,
    NONE,
    PAD,
    POSTERIOR,
    SELF_ATTENTION,
    SOURCE,
    TARGET,
    VALID,
    VARIATIONAL,
    V,
    attention,
    logits_of,
    model_of,
    regularised,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nmt.model.prediction import Readouts
from nmt.model.seq2seq import Seq2Seq
from nmt.translate.beam import Scorer, Selection, beam_search
from nmt.translate.prepared_model import SearchModel
from nmt.translate.sampling import rollout
from nmt.translate.search import Limits, SearchBatch, Symbols

COMBINATIONS = [
    {
        "encoder__cell": cell,
        "decoder__cell": cell,
        "decoder__layers": layers,
        "decoder__attend": attend,
        "decoder__input_feeding": feeding,
        "decoder__readout": readout,
        "decoder__bridge": bridge,
        "decoder__lexical": layers == 2 and kind["kind"] != "none",
        "decoder__fixnorm": readout == "deep",
        "attention": kind,
    }
    for (cell, layers, readout, bridge), attend, feeding, kind in itertools.product(
        [
            ("gru", 1, "maxout", "final"),
            ("lstm", 2, "attentional", "mean"),
            ("rnn", 2, "deep", "final"),
            ("lstm", 1, "deep", "final"),
        ],
        ["before", "between", "after", "first_layer"],
        [False, True],
        [
            NONE,
            CHO,
            attention("additive"),
            attention("dot"),
            attention("location_aware", coverage={"kind": "linear", "loss_weight": 1.0, "loss_start": 0}),
            attention(
                "general",
                window={"kind": "local_p", "reach": 1, "dim": 3},
                projection={"kind": "heads", "heads": 2, "dim": 4},
            ),
            attention("normed_additive", normalizer={"kind": "monotonic", "noise": 1.0, "initial_offset": 1.0}),
        ],
    )
    if (attend == "after" or kind["kind"] != "none") and (attend != "first_layer" or (layers == 2 and not feeding))
]
COMBINATIONS += [
    regularised(
        cell, layers, decoder__attend=attend, decoder__input_feeding=feeding, decoder__lexical=lexical, attention=kind
    )
    for cell, layers, attend, feeding, lexical, kind in [
        ("gru", 1, "before", False, True, attention("additive")),
        ("lstm", 2, "before", True, False, attention("additive")),
        ("gru", 3, "between", False, False, attention("dot")),
        ("lstm", 1, "between", True, True, attention("additive")),
        ("rnn", 2, "after", True, False, attention("general")),
        ("lstm", 3, "after", False, True, attention("dot")),
        ("gru", 2, "after", False, False, CHO),
        ("lstm", 3, "first_layer", False, True, attention("additive")),
        ("gru", 2, "first_layer", False, False, attention("location_aware")),
    ]
]
MOCHA = {"kind": "mocha", "noise": 1.0, "initial_offset": 1.0, "chunk": 2}
FERTILITY = {"kind": "fertility", "fertility": 0.7}
HEADS = {"kind": "heads", "heads": 2, "dim": 4}
COMBINATIONS += [
    {
        "encoder__cell": cell,
        "decoder__cell": cell,
        "decoder__layers": layers,
        "decoder__attend": attend,
        "decoder__input_feeding": feeding,
        "attention": kind,
    }
    for (cell, layers, attend, feeding), kind in itertools.product(
        [
            ("gru", 1, "before", False),
            ("lstm", 2, "after", False),
            ("rnn", 1, "between", True),
            ("gru", 2, "first_layer", False),
        ],
        [
            attention("general", normalizer={"kind": "linear_chain"}),
            attention("additive", normalizer=FERTILITY, projection=HEADS),
            attention("dot", normalizer=FERTILITY, coverage={"kind": "linear", "loss_weight": 1.0, "loss_start": 0}),
            attention("normed_additive", normalizer=MOCHA),
            attention("location_aware", normalizer=MOCHA, projection=HEADS),
            attention("gaussian_mixture"),
        ],
    )
]
GNMT = {
    "encoder__bidirectional": "first",
    "encoder__residual": 3,
    "decoder__residual": 3,
    "decoder__attend": "first_layer",
    "decoder__input_feeding": False,
    "decoder__lexical": False,
    "attention": attention("normed_additive"),
}
COMBINATIONS.append({**regularised("lstm", 4), **GNMT})
FEW = MARGINAL | {"top_k": 3, "min_share": 0.5}
COVERAGE = {"kind": "linear", "loss_weight": 1.0, "loss_start": 0}
FIRST_ORDER = {"kind": "first_order", "reach": 2, "monotonic": False}
LATENT = [
    regularised(
        cell,
        layers,
        decoder__attend=attend,
        decoder__input_feeding=feeding,
        decoder__readout=readout,
        decoder__lexical=lexical,
        decoder__fixnorm=lexical,
        attention=kind,
    )
    for cell, layers, attend, feeding, readout, lexical, kind in [
        ("gru", 1, "after", True, "deep", True, attention("general", alignment=MARGINAL)),
        ("lstm", 2, "before", False, "maxout", False, attention("additive", alignment=MARGINAL | {"top_k": 2})),
        ("gru", 1, "between", True, "attentional", True, attention("dot", alignment=MARGINAL)),
        (
            "lstm",
            2,
            "first_layer",
            False,
            "deep",
            True,
            attention("additive", alignment=MARGINAL | {"top_k": 3, "min_share": 0.5}),
        ),
        (
            *("rnn", 1, "after", False, "deep", False),
            attention("location_aware", alignment=MARGINAL, window={"kind": "local_m", "reach": 1}),
        ),
        (
            *("gru", 1, "after", False, "deep", False),
            attention("general", alignment=MARGINAL, window={"kind": "local_p", "reach": 1, "dim": 3}),
        ),
        ("gru", 1, "after", True, "deep", False, attention("general", alignment=VARIATIONAL)),
        ("lstm", 1, "before", False, "deep", True, attention("additive", alignment=VARIATIONAL | {"top_k": 2})),
        (
            *("gru", 1, "after", True, "deep", False),
            attention("general", alignment=VARIATIONAL, normalizer={"kind": "linear_chain"}),
        ),
        ("gru", 1, "after", True, "deep", True, attention("general", alignment=POSTERIOR)),
        ("lstm", 2, "after", True, "maxout", False, attention("additive", alignment=POSTERIOR | {"top_k": 2})),
        (
            *("gru", 1, "after", False, "deep", True),
            attention("general", alignment=POSTERIOR | {"prior_share": 0.0}, normalizer=FIRST_ORDER),
        ),
        (
            *("gru", 1, "before", True, "deep", False),
            attention(
                "additive", alignment=POSTERIOR, coverage={"kind": "linear", "loss_weight": 0.0, "loss_start": 0}
            ),
        ),
    ]
]
COMBINATIONS += LATENT
COPYING = [
    {
        "encoder__cell": cell,
        "decoder__cell": cell,
        "decoder__layers": layers,
        "decoder__attend": attend,
        "decoder__input_feeding": feeding,
        "decoder__readout": readout,
        "decoder__lexical": lexical,
        "decoder__fixnorm": lexical,
        "decoder__copy": True,
        "attention": kind,
    }
    for cell, layers, attend, feeding, readout, lexical, kind in [
        ("gru", 1, "after", False, "deep", False, attention("dot")),
        ("lstm", 2, "before", True, "maxout", True, attention("additive", coverage=COVERAGE)),
        ("gru", 1, "between", False, "attentional", True, attention("general", projection=HEADS)),
        ("lstm", 2, "first_layer", False, "deep", False, attention("additive", normalizer={"kind": "sparsemax"})),
        (
            *("rnn", 2, "after", True, "deep", True),
            attention("general", window={"kind": "local_p", "reach": 1, "dim": 3}),
        ),
        ("gru", 1, "after", False, "maxout", False, attention("normed_additive", normalizer=MOCHA, projection=HEADS)),
        ("lstm", 1, "before", False, "deep", False, attention("dot", normalizer=FERTILITY)),
    ]
]
COMBINATIONS += COPYING


class Casts(TorchDispatchMode):
    """Notes what is cast while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is torch.ops.aten._to_copy.default:
            self.inputs.append(args[0])
        return func(*args, **(kwargs or {}))


def label(changes: dict[str, Any]) -> str:
    parts = changes["attention"]
    kind = parts["context"] if parts["kind"] == "none" else parts["score"]["kind"]
    for part, plain in (("normalizer", "softmax"), ("alignment", "expected")):
        if parts.get(part, {}).get("kind", plain) != plain:
            kind += f"-{parts[part]['kind']}"
    feed = "-feed" if changes["decoder__input_feeding"] else ""
    feed += "-copy" if changes.get("decoder__copy") else ""
    more = "-regularised" if "embedding__dropout" in changes else ""
    return f"{changes['encoder__cell']}{changes['decoder__layers']}-{changes['decoder__attend']}{feed}-{kind}{more}"


def choices(changes: dict[str, Any]) -> list[tuple[str, str]]:
    """The values of a combination, the attention's parts each by itself."""
    values = {**changes, **{f"attention.{part}": value for part, value in changes["attention"].items()}}
    return [(key, str(value)) for key, value in values.items() if key != "attention"]


EVERY = slow_but_pairwise(COMBINATIONS, choices)


@pytest.fixture(params=EVERY, ids=label)
def model(request: pytest.FixtureRequest) -> Seq2Seq:
    return model_of(**request.param)


def test_stepping_equals_one_call(model: Seq2Seq) -> None:
    """The search's steps, given the target's words, go where teacher forcing goes."""
    decoded = model(SOURCE, LENGTHS, TARGET)
    logits = logits_of(model, decoded)
    state = model.encode(SOURCE, LENGTHS)
    for t in range(TARGET.shape[1]):
        step = model.step(TARGET[:, t], state)
        torch.testing.assert_close(step.logits, logits[:, t], rtol=1e-10, atol=1e-10)
        if decoded.weights is not None:
            torch.testing.assert_close(step.weights, decoded.weights[:, t], rtol=1e-10, atol=1e-10)
        state = step.state


def test_both_ways_through_the_decoder_are_equal(model: Seq2Seq) -> None:
    if model.decoder.stepped:
        return
    embedded = model.target_embedding(TARGET)
    fused = model.decoder.forward_fused(embedded, model.encode(SOURCE, LENGTHS))
    stepped = model.decoder.forward_stepped(embedded, model.encode(SOURCE, LENGTHS))
    torch.testing.assert_close(fused.readouts, stepped.readouts, rtol=1e-10, atol=1e-10)
    if fused.weights is not None:
        torch.testing.assert_close(fused.weights, stepped.weights, rtol=1e-10, atol=1e-10)


def test_padding_and_batch_mates_change_nothing(model: Seq2Seq) -> None:
    together = logits_of(model, model(SOURCE, LENGTHS, TARGET))
    for row, length in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1)
        alone = logits_of(model, model(SOURCE[one, :length], LENGTHS[one], TARGET[one]))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-10, atol=1e-10)
    wide = torch.full((3, 9), 12)
    wide[:, :5] = torch.where(SOURCE == PAD, 12, SOURCE)  # other words where padding was
    other = logits_of(model, model(wide, LENGTHS, TARGET))
    torch.testing.assert_close(other, together, rtol=1e-10, atol=1e-10)


def test_a_word_depends_on_the_words_before_it_alone(model: Seq2Seq) -> None:
    changed = TARGET.clone()
    changed[:, 2] = 5
    before, after = (logits_of(model, model(SOURCE, LENGTHS, target)) for target in (TARGET, changed))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_every_parameter_takes_part(model: Seq2Seq) -> None:
    """No part of the model is built and then not used."""
    model.train()
    decoded = model(SOURCE, LENGTHS, TARGET, target_out=TARGET)
    model.loss(decoded.prediction, TARGET, PAD, LIKELIHOOD).total.backward()
    idle = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert idle == []


def test_a_beam_of_one_equals_greedy(model: Seq2Seq) -> None:
    symbols, limits = Symbols(BOS, EOS, (PAD, BOS)), Limits(1, [9, 6, 8])
    with torch.no_grad():
        batch = SearchBatch(model.step, model.encode(SOURCE, LENGTHS), symbols, limits, torch.device("cpu"))
        beam = beam_search(batch, Selection(1, EOS), scorer=Scorer("average", 1.0))
        greedy = rollout(batch, lambda log_probs, _: log_probs.argmax(-1))
    assert [found[0].tokens for found in beam] == [found.tokens for found in greedy]


def test_a_beam_that_shares_sentences_finds_what_one_with_copies_finds(model: Seq2Seq) -> None:
    symbols, limits = Symbols(BOS, EOS, (PAD, BOS)), Limits(1, [9, 3, 6])
    results = []
    with torch.no_grad():
        state = model.encode(SOURCE, LENGTHS)
        for each in (state, state._replace(shares_source=False)):
            batch = SearchBatch(model.step, each, symbols, limits, torch.device("cpu"))
            results.append(beam_search(batch, Selection(3, EOS), 3, scorer=Scorer("average", 1.0)))
    for shared, copied in zip(*results, strict=True):
        assert [each.tokens for each in shared] == [each.tokens for each in copied]
        for ours, theirs in zip(shared, copied, strict=True):
            assert ours.score == pytest.approx(theirs.score, abs=1e-5)
            if ours.attention is not None:
                torch.testing.assert_close(ours.attention, theirs.attention, rtol=1e-4, atol=1e-5)


def test_beams_share_their_sentence_unless_the_attention_reads_the_past() -> None:
    for each in (attention("additive"), attention("additive", window={"kind": "local_m", "reach": 1})):
        assert model_of(attention=each).encode(SOURCE, LENGTHS).shares_source
    coverage = {"kind": "linear", "loss_weight": 0.0, "loss_start": 0}
    for each in (
        attention("location_aware"),
        attention("additive", coverage=coverage),
        attention("dot", normalizer=FERTILITY),
        attention("normed_additive", normalizer=MOCHA),
        attention("gaussian_mixture"),
    ):
        assert not model_of(attention=each).encode(SOURCE, LENGTHS).shares_source


def test_beam_attention_is_that_of_forced_decoding(model: Seq2Seq) -> None:
    """The rows a search reports belong to the tokens it reports."""
    symbols, limits = Symbols(BOS, EOS, (PAD, BOS)), Limits(2, [6, 6, 6])
    with torch.no_grad():
        batch = SearchBatch(model.step, model.encode(SOURCE, LENGTHS), symbols, limits, torch.device("cpu"))
        found = beam_search(batch, Selection(4, EOS), scorer=Scorer())
        for row, (best, *_) in enumerate(found):
            target = torch.tensor([[BOS, *best.tokens[:-1]]])
            decoded = model(SOURCE[row : row + 1], LENGTHS[row : row + 1], target)
            log_probs = logits_of(model, decoded)[0].log_softmax(-1)
            forced = log_probs.gather(1, torch.tensor(best.tokens)[:, None]).sum()
            assert best.log_prob == pytest.approx(float(forced), abs=1e-4)
            if decoded.weights is None:
                assert best.attention is None
            else:
                assert best.attention is not None
                torch.testing.assert_close(best.attention.double(), decoded.weights[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["fixnorm", "lexical"])
def test_no_tensor_is_cast_at_two_steps(part: str) -> None:
    """What all steps of a search read is cast once; the logits keep the bits of an output layer that casts anew."""
    model = model_of(**{f"decoder__{part}": True}, decoder__input_feeding=True).float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        prepared, casts = SearchModel(model, 1, lambda weight, bounded=False: weight), []
        state = prepared.encode(SOURCE, LENGTHS)
        for word in TARGET.unbind(1):
            with Casts() as found:
                output = prepared.step(word, state)
            state = output.state
            casts.append(found.inputs)
            if part == "fixnorm":
                assert torch.equal(output.logits, model.output(state.hypothesis.feed))
    _, second, third, _ = ({each.data_ptr() for each in step} for step in casts)  # all still there: no address twice
    assert second
    assert not second & third


def test_fused_only_where_nothing_feeds_back() -> None:
    assert not model_of().decoder.stepped
    assert model_of(decoder__attend="before").decoder.stepped
    assert model_of(decoder__input_feeding=True).decoder.stepped
    assert not model_of(decoder__attend="first_layer", decoder__layers=2).decoder.stepped


@pytest.mark.parametrize("kind", ["before", "after"])
def test_timing_queries_the_previous_or_the_current_state(kind: str) -> None:
    """Before: the first weights follow from the first state alone, whatever the first word is. After: not."""
    model = model_of(decoder__attend=kind)
    other = TARGET.clone()
    other[:, 0] = 11
    weights = [model(SOURCE, LENGTHS, target).weights[:, 0] for target in (TARGET, other)]
    assert torch.equal(*weights) == (kind == "before")


def test_input_feeding_feeds_the_readout() -> None:
    model = model_of(decoder__input_feeding=True)
    start = model.encode(SOURCE, LENGTHS)
    assert start.hypothesis.feed is not None
    assert not start.hypothesis.feed.any()
    readout, _, state = model.decoder.step(model.target_embedding(TARGET[:, 0]), start)
    assert torch.equal(state.hypothesis.feed, readout.readouts)
    changed = state._replace(hypothesis=state.hypothesis._replace(feed=state.hypothesis.feed + 1))
    assert not torch.equal(model.step(TARGET[:, 1], state).logits, model.step(TARGET[:, 1], changed).logits)


@pytest.mark.parametrize("kind", [attention("dot"), attention("dot", projection=SELF_ATTENTION["projection"])])
@pytest.mark.parametrize("feeding", [False, True])
def test_the_lexical_model_adds_what_the_attended_words_say(feeding: bool, kind: dict[str, Any]) -> None:
    """tanh(W f + b) + f with f = tanh(sum a_s e_s), once: what is fed back is the readout without it."""
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


def test_with_fixnorm_the_first_gradient_is_not_that_of_padding() -> None:
    """Its row of the tied table is zero, where a direction has no derivative."""
    model = model_of(decoder__fixnorm=True, embedding__tie_output=True)
    weight, pad = model.output.weight, model.target_embedding.padding_idx
    assert not weight[pad].any()
    readouts = torch.randn(7, weight.shape[1], dtype=weight.dtype)
    F.cross_entropy(model.output(readouts), torch.tensor([4, 5, 6, 7, 4, 5, 6])).backward()
    assert weight.grad is not None
    lengths = weight.grad.norm(dim=-1)
    assert lengths[pad] < 1000 * lengths.median()


def test_with_fixnorm_a_logit_is_a_scaled_cosine() -> None:
    """However long a word's vector and the readout are. The scale is sqrt(R) before training."""
    model = model_of(decoder__fixnorm=True, embedding__tie_output=False)
    output = model.output
    output.bias.data.normal_()
    readouts = model(SOURCE, LENGTHS, TARGET).readouts
    cosine = F.cosine_similarity(readouts[..., None, :], output.weight, dim=-1)
    torch.testing.assert_close(output(readouts), 6**0.5 * cosine + output.bias)
    before, at_first = output(readouts), model.step(TARGET[:, 0], model.encode(SOURCE, LENGTHS)).logits
    torch.testing.assert_close(at_first, before[:, 0])
    output.weight.data[4] *= 3
    torch.testing.assert_close(output(7 * readouts), before)
    assert output.scale is not None
    output.scale.data *= 2
    torch.testing.assert_close(output(readouts) - output.bias, 2 * (before - output.bias))
    assert model_of().output.scale is None


def test_the_lexical_model_drops_words_and_what_it_adds() -> None:
    model = model_of(decoder__lexical=True, decoder__dropout=0.5, embedding__dropout=0.3).train()
    state = model.encode(SOURCE, LENGTHS)
    assert state.source.words is not None
    assert (state.source.words[VALID] == 0).any()
    model.decoder.readout.proj.weight.data.zero_()  # leaves what the lexical model says
    readouts = model.decoder(model.target_embedding(TARGET), state).readouts
    assert 0.2 < (readouts == 0).float().mean() < 0.8


@pytest.mark.parametrize(("context", "expected"), [("first_state", False), ("every_step", True)])
def test_the_fixed_vector_enters_once_or_at_every_step(context: str, expected: bool) -> None:
    model = model_of(attention={"kind": "none", "context": context})
    assert (model.encode(SOURCE, LENGTHS).hypothesis.fixed is not None) == expected


def test_ties_share_one_matrix() -> None:
    model = model_of()
    assert model.source_embedding.weight is model.target_embedding.weight is model.output.weight
    loose = model_of(embedding__tie_source_target=False, embedding__tie_output=False, decoder__readout_dim=5)
    assert loose.source_embedding.weight is not loose.target_embedding.weight
    assert loose.output.weight.shape == (V, 5)


def test_the_bridge_reads_the_final_or_the_mean_state() -> None:
    model, mean = model_of(), model_of(decoder__bridge="mean")
    embedded = model.source_embedding(SOURCE[:1])
    states, summary, *_ = model.encoder(embedded, LENGTHS[:1])
    torch.testing.assert_close(summary[0], torch.cat([states[0, -1, :4], states[0, 0, 4:]]))
    states, summary, *_ = mean.encoder(mean.source_embedding(SOURCE), LENGTHS)
    torch.testing.assert_close(summary[1], states[1, :2].mean(0))


@pytest.mark.parametrize(
    "changes",
    [{"encoder__dropout": 0.5}, {"decoder__dropout": 0.5}, {"embedding__dropout": 0.5}],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("feeding", [False, True])
def test_dropout_acts_in_training_only(changes: dict[str, Any], feeding: bool) -> None:
    model = model_of(decoder__input_feeding=feeding, **changes)
    assert torch.equal(model(SOURCE, LENGTHS, TARGET).readouts, model(SOURCE, LENGTHS, TARGET).readouts)
    model.train()
    assert not torch.equal(model(SOURCE, LENGTHS, TARGET).readouts, model(SOURCE, LENGTHS, TARGET).readouts)


@pytest.mark.parametrize("feeding", [False, True])
def test_dropout_between_decoder_layers_acts_on_both_ways(feeding: bool) -> None:
    model = model_of(decoder__layers=2, decoder__dropout=0.5, decoder__input_feeding=feeding)
    model.decoder.dropout.p = 0.0  # leaves the dropout between layers
    model.train()
    assert not torch.equal(model(SOURCE, LENGTHS, TARGET).readouts, model(SOURCE, LENGTHS, TARGET).readouts)


def test_a_unidirectional_deep_encoder_works() -> None:
    model = model_of(encoder__bidirectional=False, encoder__layers=2, encoder__hidden=8)
    assert model(SOURCE, LENGTHS, TARGET).weights.shape == (3, 4, 5)


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_an_encoder_may_read_in_both_directions_in_its_first_layer_only(cell: str) -> None:
    """As torch's own modules one after another, with residual connections from the third layer on (Wu et al. 2016)."""
    model = model_of(
        encoder__cell=cell, encoder__bidirectional="first", encoder__layers=4, encoder__residual=3, encoder__hidden=8
    )
    embedded, encoder = model.source_embedding(SOURCE), model.encoder
    states, summary, *_ = encoder(embedded, LENGTHS)
    assert encoder.rnn.bidirectional
    assert encoder.rnn.num_layers == 1
    for row, length in enumerate(LENGTHS.tolist()):
        below, _ = encoder.rnn(embedded[row : row + 1, :length])
        for number, layer in enumerate(encoder.upper.layers, 2):
            own, final = layer(below)
            below = below + own if number >= 3 else own
        torch.testing.assert_close(states[row, :length], below[0])
        assert not states[row, length:].any()
        last = torch.cat([below[0, -1], final[1][0, 0]]) if cell == "lstm" else below[0, -1]
        torch.testing.assert_close(summary[row], last)


def test_loss_counts_real_tokens_alone() -> None:
    model = model_of()
    padded = torch.cat([TARGET, torch.full((3, 2), PAD)], dim=1)
    prediction = model(SOURCE, LENGTHS, torch.cat([TARGET, torch.full((3, 2), 5)], dim=1)).prediction
    whole, real = (
        model.loss(predicted, targets, PAD, LIKELIHOOD)
        for predicted, targets in ((prediction, padded), (Readouts(prediction.readouts[:, :4]), TARGET))
    )
    torch.testing.assert_close(whole.total, real.total)
    torch.testing.assert_close(whole.terms["loss"].sum(), real.terms["loss"].sum())
    torch.testing.assert_close(-model.log_probs(prediction, padded, PAD), whole.terms["loss"])


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
        memory, past = layer.attention.remember(expected, VALID), layer.attention.start(VALID)
        attended = layer.attention.sequence(expected, memory, past)
        expected = layer.norm(expected + attended.context) * VALID[:, :, None]
    torch.testing.assert_close(states, expected)


@pytest.mark.parametrize("normalizer", [SELF_ATTENTION["normalizer"], {"kind": "linear_chain"}])
def test_self_attention_knows_no_padding_or_batch_mates(normalizer: dict[str, Any]) -> None:
    model = model_of(encoder__self_attention={**SELF_ATTENTION, "normalizer": normalizer})
    together = model(SOURCE, LENGTHS, TARGET).readouts
    for row, length in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1)
        alone = model(SOURCE[one, :length], LENGTHS[one], TARGET[one]).readouts
        torch.testing.assert_close(alone, together[one], rtol=1e-10, atol=1e-10)


def test_initialisation_keeps_single_numbers_and_layer_norms() -> None:
    model = model_of(
        encoder__self_attention=SELF_ATTENTION,
        attention=attention("normed_additive", normalizer={"kind": "monotonic", "noise": 1.0, "initial_offset": -3.0}),
    )
    assert model.encoder.self_attention[0].norm.weight.eq(1).all()
    inner = model.decoder.attention
    assert inner.normalizer.offset.item() == -3
    assert inner.score.gain.item() == pytest.approx(6**-0.5)


def test_an_lstm_passes_its_inputs_on_as_strongly_as_a_gru() -> None:
    sizes = {}
    for cell in ("gru", "lstm"):
        encoder = model_of(encoder__cell=cell, encoder__layers=1, encoder__hidden=64, attention=NONE).encoder.rnn
        inputs = torch.randn(64, 1, encoder.input_size, dtype=torch.float64) / encoder.input_size**0.5
        sizes[cell] = encoder(inputs)[0].std().item()
    assert 0.5 < sizes["lstm"] / sizes["gru"] < 2
