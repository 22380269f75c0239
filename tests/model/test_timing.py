"""When a decoder attends: against the papers' recurrences, written again in float64 NumPy for one sentence.

Shapes: S source positions, T target positions, E embedding, H hidden, M memory, R readout.
"""

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import TINY, values_of
from numpy.typing import NDArray
from torch import Tensor

from nmt.config.compose import validated
from nmt.config.schema import TrainConfig
from nmt.model.build import build_model
from nmt.model.decoder import Decoder
from nmt.model.seq2seq import Seq2Seq

Array = NDArray[np.float64]
Parameters = dict[str, Array]
Cell = tuple[Array, Array | None]  # hidden (H,), memory (H,) of an LSTM

V, PAD = 11, 0
PRESETS = {  # additive scores, three readouts
    "before": "bahdanau",
    "between": "nematus",
    "after": "luong_concat",
    "first_layer": "nematus",
}
LENGTHS = torch.tensor([5, 2, 4])
SOURCE = torch.randint(4, V, (3, 5), generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(4, V, (3, 4), generator=torch.Generator().manual_seed(1))


class Timing(NamedTuple):
    attend: str
    input_feeding: bool
    cell: str
    layers: int
    residual: bool | int = False

    def __str__(self) -> str:
        feeding, residual = "-feeding" * self.input_feeding, f"-residual{self.residual}" * bool(self.residual)
        return f"{self.attend}{feeding}-{self.cell}{self.layers}{residual}"


TIMINGS = [
    Timing(attend, feeding, cell, layers)
    for attend in ("before", "between", "after")
    for feeding in (False, True)
    for cell in ("gru", "lstm")
    for layers in (1, 2)
]
ONE_OF_EACH = [*TIMINGS[::4], Timing("first_layer", False, "gru", 2)]
TIMINGS += [
    ONE_OF_EACH[-1],
    Timing("first_layer", False, "lstm", 4, 3),
    Timing("first_layer", False, "gru", 3, True),
    Timing("after", False, "lstm", 4, 3),
    Timing("after", True, "gru", 3, 3),
]


@cache
def preset(name: str, coverage: str) -> dict[str, Any]:
    parts = [f"attention={name}", f"attention/coverage={coverage}"]
    return values_of("train", [*TINY, *parts, "encoder.hidden=4", "decoder.hidden=6"])


def model_of(timing: Timing, coverage: str = "none", **decoder: Any) -> Seq2Seq:  # noqa: ANN401
    """In float64, with random parameters: none is left at its first value."""
    values = deepcopy(preset(PRESETS[timing.attend], coverage))
    values["decoder"] |= {**timing._asdict(), **decoder}
    config = validated(TrainConfig, values)
    assert config.decoder.attend == timing.attend
    model = build_model(config, V, V, (PAD, PAD)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.fixture(params=TIMINGS, ids=str)
def model(request: pytest.FixtureRequest) -> Seq2Seq:
    return model_of(request.param)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def recurrent(p: Parameters, layer: int, x: Array, before: Cell) -> Cell:
    """One step of one layer; a GRU's reset gate acts after the product, as in cuDNN."""
    hidden, memory = before
    i = p[f"weight_ih_l{layer}"] @ x + p[f"bias_ih_l{layer}"]
    h = p[f"weight_hh_l{layer}"] @ hidden + p[f"bias_hh_l{layer}"]
    H = len(hidden)
    if memory is None:
        r, z = sigmoid(i[:H] + h[:H]), sigmoid(i[H : 2 * H] + h[H : 2 * H])
        new = np.tanh(i[2 * H :] + r * h[2 * H :])
        return (1 - z) * new + z * hidden, None
    input_gate, forget, new, output_gate = (part for part in (i + h).reshape(4, H))
    memory = sigmoid(forget) * memory + sigmoid(input_gate) * np.tanh(new)
    return sigmoid(output_gate) * np.tanh(memory), memory


def additive(p: Parameters, query: Array, states: Array) -> tuple[Array, Array]:
    """(H,), (S, M) -> context (M,), weights (S,)."""
    w, u, v = (p[f"{name}.weight"] for name in ("query_proj", "key_proj", "energy"))
    odds = np.exp([v[0] @ np.tanh(w @ query + u @ h) for h in states])
    weights = odds / odds.sum()
    return weights @ states, weights


def output_of(layer: int, cells: list[Cell], residual: int) -> Array:
    """Wu et al. 2016, equation 6: from layer `residual` on (counted from 1; 0: none), a layer's input is added."""
    hidden = cells[layer][0]
    return hidden + output_of(layer - 1, cells, residual) if 0 < residual <= layer + 1 else hidden


def read_out(p: Parameters, kind: str, state: Array, context: Array, word: Array) -> Array:
    seen = [state, context] if kind == "attentional" else [state, context, word]
    projected = p["weight"] @ np.concatenate(seen) + p["bias"]
    if kind == "maxout":
        return np.array([max(pair) for pair in projected.reshape(-1, 2)])
    return np.tanh(projected)


def parameters(module: torch.nn.Module | None) -> Parameters:
    return {} if module is None else {name: value.detach().numpy() for name, value in module.named_parameters()}


def decode(model: Seq2Seq, words: Array, states: Array, cells: list[Cell]) -> tuple[Array, Array]:
    """(T, E), (S, M), the first state of each layer -> readouts (T, R), weights (T, S)."""
    decoder = model.decoder
    rnn, conditional, readout = (parameters(part) for part in (decoder.rnn, decoder.conditional, decoder.readout.proj))
    upper = [] if decoder.upper is None else [parameters(layer) for layer in decoder.upper.layers]
    residual = decoder.residual
    score = parameters(decoder.attention.score)
    feed = np.zeros(model.output.in_features)
    rows = []
    for word in words:
        inputs = [word]
        if decoder.attend == "before":  # Bahdanau et al. 2015, A.2.2
            context, weights = additive(score, output_of(len(cells) - 1, cells, residual), states)
            inputs.append(context)
        if decoder.input_feeding:  # Luong et al. 2015, 3.3
            inputs.append(feed)
        new = [recurrent(rnn, 0, np.concatenate(inputs), cells[0])]
        if decoder.attend == "between":  # Sennrich et al. 2017: the conditional GRU
            context, weights = additive(score, new[0][0], states)
            new[0] = recurrent(conditional, 0, context, new[0])
        if decoder.attend == "first_layer":  # Wu et al. 2016, 3, with the current state as the query
            context, weights = additive(score, new[0][0], states)
        for layer in range(1, len(cells)):
            below = output_of(layer - 1, new, residual)
            if decoder.attend == "first_layer":
                new.append(recurrent(upper[layer - 1], 0, np.concatenate([below, context]), cells[layer]))
            else:
                new.append(recurrent(rnn, layer, below, cells[layer]))
        cells = new
        top = output_of(len(cells) - 1, cells, residual)
        if decoder.attend == "after":  # Luong et al. 2015, 3
            context, weights = additive(score, top, states)
        feed = read_out(readout, decoder.readout.kind, top, context, word)
        rows.append((feed, weights))
    readouts, all_weights = zip(*rows, strict=True)
    return np.stack(readouts), np.stack(all_weights)


@torch.no_grad()
def test_equals_the_recurrence(model: Seq2Seq) -> None:
    decoded, start = model(SOURCE, LENGTHS, TARGET), model.encode(SOURCE, LENGTHS)
    words = model.target_embedding(TARGET).numpy()
    for b, length in enumerate(LENGTHS.tolist()):
        memories = start.hypothesis.recurrent.cell or [None] * len(start.hypothesis.recurrent.hidden)
        cells = [
            (hidden[b].numpy(), None if memory is None else memory[b].numpy())
            for hidden, memory in zip(start.hypothesis.recurrent.hidden, memories, strict=True)
        ]
        readouts, weights = decode(model, words[b], start.source.memory.values[b, :length].numpy(), cells)
        np.testing.assert_allclose(decoded.readouts[b].numpy(), readouts, rtol=0, atol=1e-10)
        np.testing.assert_allclose(decoded.weights[b, :, :length].numpy(), weights, rtol=0, atol=1e-10)
        assert not decoded.weights[b, :, length:].any()


def changed(one: Tensor, other: Tensor) -> list[int]:
    """(B, T, ...) -> the steps at which they differ."""
    return [t for t in range(one.shape[1]) if not torch.equal(one[:, t], other[:, t])]


@torch.no_grad()
@pytest.mark.parametrize("t", range(TARGET.shape[1]))
def test_a_word_moves_the_weights_after_it_and_where_the_query_has_seen_it_those_beside_it(
    model: Seq2Seq, t: int
) -> None:
    """Row t leads to the readout of step t, whose input is word t; attending before the step does not know that word,
    though the readout does."""
    other = TARGET.clone()
    other[:, t] = (TARGET[:, t] - 4 + 1) % (V - 4) + 4
    one, two = model(SOURCE, LENGTHS, TARGET), model(SOURCE, LENGTHS, other)
    steps = list(range(TARGET.shape[1]))
    assert changed(one.readouts, two.readouts) == steps[t:]
    assert changed(one.weights, two.weights) == steps[t + (model.decoder.attend == "before") :]


@torch.no_grad()
@pytest.mark.parametrize("timing", ONE_OF_EACH, ids=str)
def test_the_readout_of_a_step_sees_the_context_of_its_own_row(timing: Timing) -> None:
    """With a readout that passes the first numbers of the context on, and nothing else."""
    model = model_of(timing, readout="attentional")
    R, H, M = model.output.in_features, model.decoder.rnn.hidden_size, model.encoder.output_dim
    model.decoder.readout.proj.bias.zero_()
    model.decoder.readout.proj.weight.copy_(torch.cat([torch.zeros(R, H), torch.eye(R, M)], dim=1))
    decoded, states = model(SOURCE, LENGTHS, TARGET), model.encode(SOURCE, LENGTHS).source.memory.values
    contexts = torch.bmm(decoded.weights, states)
    torch.testing.assert_close(decoded.readouts[:, :, :M].atanh(), contexts, rtol=0, atol=1e-10)
    assert len(changed(contexts[:, :-1], contexts[:, 1:])) == TARGET.shape[1] - 1  # no two rows are alike


@torch.no_grad()
def test_the_query_is_the_top_state_before_or_after_the_step_or_the_first_layers(model: Seq2Seq) -> None:
    """A score that records its queries."""
    queries: list[Tensor] = []
    model.decoder.attention.score.register_forward_pre_hook(lambda _, given: queries.append(given[0]))
    state = model.encode(SOURCE, LENGTHS)
    tops, bottoms = [model.decoder._output(state.hypothesis.recurrent)], []
    for t in range(TARGET.shape[1]):
        _, _, state = model.decoder.step(model.target_embedding(TARGET[:, t]), state)
        tops.append(model.decoder._output(state.hypothesis.recurrent))
        bottoms.append(state.hypothesis.recurrent.hidden[0])
    asked = torch.cat(queries, dim=1)
    if model.decoder.attend == "before":
        assert torch.equal(asked, torch.stack(tops[:-1], dim=1))
    elif model.decoder.attend == "after":
        assert torch.equal(asked, torch.stack(tops[1:], dim=1))
    elif model.decoder.attend == "first_layer":
        assert torch.equal(asked, torch.stack(bottoms, dim=1))
    else:
        for place in (tops[:-1], tops[1:]):
            assert len(changed(asked, torch.stack(place, dim=1))) == TARGET.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("timing", ONE_OF_EACH, ids=str)
def test_each_step_goes_on_from_what_the_steps_before_it_attended_to(timing: Timing) -> None:
    """Coverage over a sentence: as if the attention had been asked all its queries at once."""
    model, queries = model_of(timing, coverage="linear"), []
    attention, start = model.decoder.attention, model.encode(SOURCE, LENGTHS)
    hook = attention.score.register_forward_pre_hook(lambda _, given: queries.append(given[0]))
    stepped = model.decoder.forward_stepped(model.target_embedding(TARGET), start).weights
    hook.remove()
    asked = torch.cat(queries, dim=1)
    expected = attention.sequence(asked, start.source.memory, start.source.past).weights
    torch.testing.assert_close(stepped, expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("coverage", ["none", "linear"])
def test_the_first_layer_queries_for_all_steps_at_once(coverage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the attention reads its past; then the attention alone goes step by step."""
    model, queries = model_of(Timing("first_layer", False, "lstm", 3), coverage=coverage), []
    model.decoder.attention.score.register_forward_pre_hook(lambda _, given: queries.append(given[0].shape[1]))
    monkeypatch.delattr(Decoder, "_decode_step")
    model(SOURCE, LENGTHS, TARGET)
    T = TARGET.shape[1]
    assert queries == ([T] if coverage == "none" else [1] * T)


@torch.no_grad()
def test_the_first_layer_sees_words_alone_and_the_layers_above_see_the_context() -> None:
    """Another source changes the context: with the same first states, the first layer stays as it is."""
    model = model_of(Timing("first_layer", False, "lstm", 3))
    start = model.encode(SOURCE, LENGTHS)
    memory = start.source.memory._replace(values=start.source.memory.values + 1)
    other = start._replace(source=start.source._replace(memory=memory))
    word = model.target_embedding(TARGET[:, 0])
    one, two = (model.decoder.step(word, state)[2].hypothesis.recurrent for state in (start, other))
    assert [torch.equal(*each) for each in zip(one.hidden, two.hidden, strict=True)] == [True, False, False]
