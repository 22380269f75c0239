"""Decoders that attend at different times, compared with the papers' recurrences in float64 NumPy for one sentence.

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

from nmt.config.checks import validated
from nmt.config.schema import TrainConfig
from nmt.model.build import build_model
from nmt.model.seq2seq import Seq2Seq

Array = NDArray[np.float64]
Parameters = dict[str, Array]
Cell = tuple[Array, Array | None]  # hidden state (H,), and cell state (H,) of an LSTM

V, PAD = 11, 0
PRESETS = {  # presets with additive scores and three different readouts
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
TIMINGS += [
    Timing("first_layer", False, "gru", 2),
    Timing("first_layer", False, "lstm", 4, 3),
    Timing("first_layer", False, "gru", 3, True),
    Timing("after", False, "lstm", 4, 3),
    Timing("after", True, "gru", 3, 3),
]


@cache
def preset(name: str) -> dict[str, Any]:
    parts = [f"attention={name}", "attention/coverage=none"]
    return values_of("train", [*TINY, *parts, "encoder.hidden=4", "decoder.hidden=6"])


def model_of(timing: Timing) -> Seq2Seq:
    """Build the model in float64 with random values for all parameters."""
    values = deepcopy(preset(PRESETS[timing.attend]))
    values["decoder"] |= timing._asdict()
    config = validated(TrainConfig, values)
    assert config.decoder.attend == timing.attend
    model = build_model(config, V, V, (PAD, PAD)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def recurrent(p: Parameters, layer: int, x: Array, before: Cell) -> Cell:
    """Compute one step of one layer. A GRU's reset gate acts after the matrix product, as in cuDNN."""
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
    """Attend with an additive score: (H,), (S, M) -> context (M,), weights (S,)."""
    w, u, v = (p[f"{name}.weight"] for name in ("query_proj", "key_proj", "energy"))
    odds = np.exp([v[0] @ np.tanh(w @ query + u @ h) for h in states])
    weights = odds / odds.sum()
    return weights @ states, weights


def output_of(layer: int, cells: list[Cell], residual: int) -> Array:
    """Add its input to a layer's hidden state, from layer `residual` on, counted from 1 (Wu et al. 2016, eq. 6)."""
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
    """Decode from the initial state of each layer: (T, E), (S, M) -> readouts (T, R), weights (T, S)."""
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
@pytest.mark.parametrize("timing", TIMINGS, ids=str)
def test_equals_the_recurrence(timing: Timing) -> None:
    model = model_of(timing)
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
