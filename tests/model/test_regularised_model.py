"""What regularises, in the whole model: where it acts, and that both ways through the decoder do the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from small_models import LENGTHS, LIKELIHOOD, PAD, SELF_ATTENTION, SOURCE, TARGET, V, attention, model_of, regularised
from torch import Tensor, nn

from nmt.model.seq2seq import Seq2Seq

TIMINGS = [
    ("gru", 1, "after", False),
    ("lstm", 3, "after", False),
    ("rnn", 2, "after", True),
    ("lstm", 2, "before", True),
    ("gru", 2, "before", False),
    ("gru", 2, "between", True),
    ("lstm", 1, "between", False),
    ("lstm", 3, "first_layer", False),
    ("gru", 2, "first_layer", False),
]
TIMED = pytest.mark.parametrize(("cell", "layers", "attend", "feeding"), TIMINGS)


def timed(cell: str, layers: int, attend: str, feeding: bool, p: float = 0.3, **changes: Any) -> Seq2Seq:  # noqa: ANN401
    timing = {"decoder__attend": attend, "decoder__input_feeding": feeding, "attention": attention("additive")}
    return model_of(**regularised(cell, layers, p, **timing, **changes))


@contextmanager
def seen(module: nn.Module) -> Iterator[list[Tensor]]:
    """What is given to a module, call by call."""
    given: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    yield given
    hook.remove()


def step_by_step(model: Seq2Seq, embedded: Tensor, state: Any) -> Tensor:  # noqa: ANN401
    readouts = []
    for word in embedded.unbind(1):
        readout, _, state = model.decoder.step(word, state)
        readouts.append(readout.readouts)
    return torch.stack(readouts, dim=1)


@TIMED
@pytest.mark.parametrize("training", [False, True])
def test_all_ways_through_the_decoder_drop_the_same(
    cell: str, layers: int, attend: str, feeding: bool, training: bool
) -> None:
    """What a sentence drops is in the state that they start from; zoneout alone is drawn at each step."""
    changes = {"decoder__zoneout": 0.0} if training else {}
    model = timed(cell, layers, attend, feeding, **changes).train(training)
    embedded, state = model.target_embedding(TARGET), model.encode(SOURCE, LENGTHS)
    ways = [
        model.decoder(embedded, state).readouts,
        model.decoder.forward_stepped(embedded, state).readouts,
        step_by_step(model, embedded, state),
    ]
    for way in ways[1:]:
        torch.testing.assert_close(way, ways[0], rtol=1e-10, atol=1e-10)
    again = model.decoder(embedded, model.encode(SOURCE, LENGTHS)).readouts
    assert torch.equal(again, ways[0]) == (not training)


def test_rows_of_a_state_go_on_as_they_would_have() -> None:
    """Search reorders them."""
    model = timed("gru", 2, "between", True, decoder__zoneout=0.0).eval()
    embedded, state = model.target_embedding(TARGET), model.encode(SOURCE, LENGTHS)
    index = torch.tensor([2, 0, 2])
    expected = step_by_step(model, embedded, state)[index]
    found = step_by_step(model, embedded[index], state.select(index))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_conditional_decoder_has_its_lowest_transitions_after_the_context() -> None:
    model = model_of(
        decoder__attend="between", decoder__layers=2, decoder__transition_depth=1, attention=attention("additive")
    )
    embedded, state = model.target_embedding(TARGET[:, :1]), model.encode(SOURCE, LENGTHS)
    assert [len(layer.transitions) for layer in state.products.layers] == [0, 1]
    assert len(state.products.conditional.transitions) == 1
    found = []
    for _ in range(2):
        with seen(model.decoder.attention.score) as queries:
            found.append((model.decoder(embedded, model.encode(SOURCE, LENGTHS)).readouts, queries[0]))
        with torch.no_grad():
            model.decoder.conditional_regularisation.transitions[0].bias_ih_l0 += 1.0
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.allclose(found[0][0], found[1][0])


def zeros(tensor: Tensor, *, alike: bool) -> None:
    """(B, T, D): something is dropped, of each sentence something else, at all positions the same or not."""
    dropped = tensor == 0
    assert 0 < dropped.double().mean() < 1
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped)) == alike
    assert len(dropped.flatten(1).unique(dim=0)) == len(dropped)


WIDE = {"embedding__dim": 32, "decoder__readout_dim": 32, "encoder__hidden": 16, "decoder__hidden": 32}


@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize(
    ("attend", "feeding"),
    [*product(["before", "between", "after"], [False, True]), ("first_layer", False)],
)
def test_a_sentence_drops_the_same_at_all_positions(variational: bool, attend: str, feeding: bool) -> None:
    """Of its embedded tokens, between layers, of the encoder's states and of the readouts, also where they are fed."""
    p = {f"{side}__dropout": 0.5 for side in ("embedding", "encoder", "decoder")}
    timing = {"decoder__attend": attend, "decoder__input_feeding": feeding, "decoder__layers": 2}
    model = model_of(**WIDE, **p, **timing, variational_dropout=variational).train()
    source = torch.randint(4, V, (3, 5))
    with seen(model.encoder) as embedded, seen(model.decoder) as words, seen(model.decoder.readout) as read:
        decoded = model(source, torch.full((3,), 5), TARGET)
    zeros(embedded[0], alike=variational)
    zeros(words[0], alike=variational)
    assert len(read) == (TARGET.shape[1] if feeding else 1)
    zeros(decoded.readouts, alike=variational)
    state = model.encode(source, torch.full((3,), 5))
    zeros(state.source.memory.values, alike=variational)
    assert (state.products.layers[1].input_mask is not None) == variational


def test_the_steps_of_a_search_drop_what_teacher_forcing_drops() -> None:
    """Of the words as well."""
    options = regularised(decoder__input_feeding=True, embedding__word_dropout=0.0, decoder__zoneout=0.0)
    model = model_of(**options).train()
    state, words = model.encode(SOURCE, LENGTHS), model.target_embedding(TARGET)
    expected = model.output(model.decoder(words * state.products.word_mask[:, None], state).readouts)
    for t in range(TARGET.shape[1]):
        step = model.step(TARGET[:, t], state)
        state = step.state
        torch.testing.assert_close(step.logits, expected[:, t], rtol=1e-10, atol=1e-10)


def test_self_attention_adds_the_same_zeros_at_all_positions() -> None:
    model = model_of(encoder__self_attention=SELF_ATTENTION, encoder__dropout=0.5, variational_dropout=True).train()
    layer = model.encoder.self_attention[0]
    layer.dropout.register_forward_hook(lambda *given: zeros(given[2], alike=True))
    with seen(layer.dropout) as given:
        model.encode(torch.randint(4, V, (3, 5)), torch.full((3,), 5))
    assert len(given) == 1


@pytest.mark.parametrize("variational", [False, True])
def test_word_dropout_takes_whole_words_one_by_one_on_both_sides(variational: bool) -> None:
    model = model_of(embedding__word_dropout=0.4, embedding__dropout=0.0, variational_dropout=variational).train()
    source, target = (torch.randint(4, V, (60, 9)) for _ in range(2))
    source[:, 7:] = PAD
    with seen(model.encoder) as sources, seen(model.decoder) as targets:
        model(source, torch.full((60,), 7), target)
    for tokens, embedded, table in ((source, sources[0], model.source_embedding), (target, targets[0], None)):
        words = (table or model.target_embedding)(tokens)
        gone, real = (embedded == 0).all(-1), tokens != PAD
        torch.testing.assert_close(embedded, torch.where(gone[..., None], 0.0, words / 0.6))
        assert gone[~real].all()
        share = gone[real].double().mean()
        assert abs(share - 0.4) < 5 * (0.24 / real.sum()) ** 0.5
        assert len(gone[:, :7].unique(dim=0)) > 30
    assert not torch.equal(sources[0][:, :7] == 0, targets[0][:, :7] == 0)
    model.eval()
    with seen(model.encoder) as sources:
        model.encode(source, torch.full((60,), 7))
    assert torch.equal(sources[0], model.source_embedding(source))


ALONE: list[tuple[dict[str, Any], bool]] = [
    ({"embedding__word_dropout": 0.3}, False),
    *(({f"{side}__{name}": 0.3}, False) for side in ("encoder", "decoder") for name in ("recurrent_dropout",)),
    *(({f"{side}__weight_drop": 0.3}, False) for side in ("encoder", "decoder")),
    *(({f"{side}__zoneout": 0.3}, True) for side in ("encoder", "decoder")),
    *(({f"{side}__layer_norm": True}, True) for side in ("encoder", "decoder")),
    *(({f"{side}__residual": True}, True) for side in ("encoder", "decoder")),
]


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("attend", ["between", "after", "first_layer"])
@pytest.mark.parametrize(("options", "in_evaluation"), ALONE, ids=str)
def test_each_option_changes_the_loss_of_training(
    options: dict[str, Any], in_evaluation: bool, attend: str, cell: str
) -> None:
    """And where it is part of the model, what the model says."""
    timing = {"decoder__attend": attend, "attention": attention("additive")}
    plain = {"encoder__layers": 2, "decoder__layers": 2, "encoder__cell": cell, "decoder__cell": cell, **timing}
    one, other = model_of(**plain), model_of(**plain, **options)
    other.load_state_dict(one.state_dict(), strict=False)
    for training, expected in ((True, True), (False, in_evaluation)):
        losses = [
            -model.log_probs(model.train(training)(SOURCE, LENGTHS, TARGET).prediction, TARGET, PAD).sum()
            for model in (one, other)
        ]
        assert (not torch.equal(*losses)) == expected


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_zoneout_of_a_conditional_step_keeps_what_was_before_the_whole_of_it(cell: str) -> None:
    """Not what the first half, over the word, has made of it."""
    timing = {"decoder__attend": "between", "attention": attention("additive")}
    plain, zoned = (model_of(decoder__cell=cell, encoder__cell=cell, decoder__zoneout=p, **timing) for p in (0.0, 0.25))
    zoned.load_state_dict(plain.state_dict())
    start, word = plain.encode(SOURCE, LENGTHS), plain.target_embedding(TARGET[:, 0])
    before, whole = start.hypothesis.recurrent, plain.decoder.step(word, start)[2].hypothesis.recurrent
    found = zoned.decoder.step(word, zoned.encode(SOURCE, LENGTHS))[2].hypothesis.recurrent
    for part in ("hidden", "cell"):
        for old, new, mixed in zip(*(getattr(each, part) for each in (before, whole, found)), strict=True):
            torch.testing.assert_close(mixed, 0.25 * old + 0.75 * new)


def test_the_query_and_the_readout_see_the_output_with_its_residual_connections() -> None:
    for attend in ("before", "after"):
        model = timed("gru", 3, attend, False)
        start = model.encode(SOURCE, LENGTHS)
        with seen(model.decoder.attention.score) as queries, seen(model.decoder.readout) as outputs:
            _, _, after = model.decoder.step(model.target_embedding(TARGET[:, 0]), start)
        sums = [torch.stack(state.hypothesis.recurrent.hidden).sum(0) for state in (start, after)]
        torch.testing.assert_close(outputs[0], sums[1])
        torch.testing.assert_close(queries[0][:, 0], sums[attend == "after"])


def test_the_first_gains_are_one_and_their_biases_zero() -> None:
    model = timed("lstm", 2, "between", True)
    gains = {name: value for name, value in model.named_parameters() if "gain_" in name}
    networks = 3 * (2 * 2 + 2 + 1)  # encoder, two directions and layers; decoder; its second half
    assert len(gains) == networks + 2 * (2 * 2 + 1 + 1)  # transitions have no input, the lower decoder layer has none
    assert all(value.eq(1).all() for value in gains.values())
    biases = [value for name, value in model.named_parameters() if "bias_memory" in name]
    assert len(biases) == 7 + 6
    assert not any(value.any() for value in biases)


def test_a_state_dict_holds_the_norms_and_nothing_of_a_batch() -> None:
    model, other = (timed("lstm", 2, "between", True) for _ in range(2))
    before = set(model.state_dict())
    model.train()(SOURCE, LENGTHS, TARGET)
    assert set(model.state_dict()) == before == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    other.load_state_dict(model.state_dict())
    ways = [each.eval()(SOURCE, LENGTHS, TARGET).readouts for each in (model, other)]
    assert torch.equal(*ways)
    plain = model_of(encoder__cell="lstm", encoder__layers=2, decoder__cell="lstm", decoder__layers=2)
    assert not any("regularisation" in name for name in plain.state_dict())


def test_equal_seeds_drop_the_same() -> None:
    model, losses = timed("gru", 2, "between", True).train(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(-model.log_probs(model(SOURCE, LENGTHS, TARGET).prediction, TARGET, PAD).sum())
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


@pytest.mark.parametrize(
    ("cell", "layers", "attend", "feeding"),
    [
        ("rnn", 2, "after", True),
        ("lstm", 3, "between", True),
        ("lstm", 4, "first_layer", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("gru", 1, "before", False), ("gru", 4, "after", False), ("lstm", 4, "before", True)]
        ),
    ],
)
def test_deep_and_with_everything_it_learns_a_batch_by_heart(
    cell: str, layers: int, attend: str, feeding: bool
) -> None:
    model = timed(cell, layers, attend, feeding, 0.05, **WIDE).float().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    target = torch.cat([TARGET[:, 1:], torch.full((3, 1), 3)], dim=1)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(model(SOURCE, LENGTHS, TARGET).prediction, target, PAD, LIKELIHOOD).total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    assert (model.output(model(SOURCE, LENGTHS, TARGET).readouts).argmax(-1) == target).all()
