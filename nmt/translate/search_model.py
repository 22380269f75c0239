"""The search model: a trained model that computes once what every step would compute again, with packed parameters.

Shapes: B batch, N hypotheses (the rows of a step), S source positions, E embedding, H hidden, M memory, R readout (2 R
before a maxout), G gates x H, V vocabulary, L tokens of a shortlist. C is the width of a context's contribution to the
recurrent layers: G if the gates of one layer read it, M if several layers do, 0 if none does.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Lock
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmt.attention.attention import Attention
from nmt.model.decoder import DecoderState, StepParameters, WordProducts
from nmt.model.output import OutputLayer, within
from nmt.model.recurrent import LayerParameters, collect_layers
from nmt.model.seq2seq import Ensemble, SearchEnsemble, Seq2Seq, StepOutput
from nmt.ops.products import Linear, Pack, Weight, in_autocast_dtype, linear, pack, pack_int8
from nmt.system.machine import Machine

MIN_ROWS = 32  # least number of rows of a step for which it pays to pack a shortlist's part of the output table
MAX_KEPT = 4  # search models that are kept, one for each beam size
MAX_TABLE = 2**26  # largest size of `Words.table` in numbers; without it, each step computes the products of its words


class Words(NamedTuple):
    """What each word of the target vocabulary adds to the lowest layer's gates and to the readout."""

    embeddings: Tensor  # (V, E)
    weight: Weight  # (G + R, E)
    bias: Tensor  # (G + R,)
    table: Tensor | None  # (V, G + R): products of all words; None if it would be too large
    vocabulary: Tensor | None = None  # int64 (L,): token of each position in a shortlist; None without a shortlist

    def __call__(self, words: Tensor) -> Tensor:
        """Look up or compute the products of words, which are positions in a shortlist: int64 (N,) -> (N, G + R)."""
        tokens = words if self.vocabulary is None else self.vocabulary[words]
        if self.table is not None:
            return self.table.index_select(0, tokens)
        return linear(self.embeddings.index_select(0, tokens), self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class SearchParameters(StepParameters):
    """The parameters of a search model, made once for all searches."""

    words: Words
    predict: OutputLayer  # parameters of the logits; with a shortlist, only those of its L tokens


class SearchModel:
    """Computes, step by step, what a Seq2Seq in evaluation mode computes, until the Seq2Seq's parameters change. Make
    and use it in the same autocast context (`Machine.autocast`)."""

    @torch.no_grad()
    def __init__(self, model: Seq2Seq, hypotheses: int, pack: Pack) -> None:
        """hypotheses: number of hypotheses of each sentence, which share its memory if the attention allows it."""
        assert not model.training
        self.model = model
        self._pack, self._hypotheses = pack, hypotheses
        self._encoder_layers = collect_layers(model.encoder.rnn, model.encoder.residual)
        readout, output = model.decoder.readout, model.output.layer()
        self._table = in_autocast_dtype(output.weight)  # (V, R)
        self._bounded = readout.kind != "maxout" and model.decoder.lexical is None and output.scale is None
        self._parameters = self._search_parameters(output)

    def _search_parameters(self, predict: OutputLayer) -> SearchParameters:
        decoder, pack, batch = self.model.decoder, self._pack, self.model.decoder.collect_parameters()
        C, P, bounded = batch.context_width, len(batch.context_readout), not decoder.residual
        context = torch.cat([batch.context[:C], batch.context_readout])  # type: ignore[index]
        bias = None if batch.context_bias is None else functional.pad(batch.context_bias[:C], (0, P))
        attention = decoder.attention
        shares_memory = attention is not None and not attention.reads_past and self._hypotheses > 1
        embedding = in_autocast_dtype(self.model.target_embedding.weight)
        of_readout = batch.word.new_zeros(P, embedding.shape[1]) if batch.word_readout is None else batch.word_readout
        words = torch.cat([batch.word, of_readout])
        word_bias = torch.cat([batch.layers[0].bias_ih, in_autocast_dtype(decoder.readout.proj.bias)])
        table = linear(embedding, words, word_bias) if len(embedding) * len(words) <= MAX_TABLE else None
        packed = {
            "layers": [_packed(layer, pack) for layer in batch.layers],
            "conditional": None if batch.conditional is None else _packed(batch.conditional, pack),
            "attention": None if attention is None else _packed_copy(attention, pack),
            "lexical": None if decoder.lexical is None else _packed_copy(decoder.lexical, pack),
            "context": context if attention is None else pack(context),
            "context_bias": bias,
            "feed": None if batch.feed is None else pack(batch.feed, bounded=decoder.readout.kind != "maxout"),
            "output": pack(batch.output, bounded=bounded),
            "output_bias": None,
            # Contexts of several heads are multiplied at every step.
            "multiplied_memory": isinstance(attention, Attention) and (shares_memory or decoder.sums_over_positions),
        }
        return SearchParameters(
            **vars(batch) | packed,
            words=Words(embedding, pack(words) if table is None else words, word_bias, table),
            predict=predict._replace(weight=cast(Tensor, pack(self._table, self._bounded))),
        )

    def encode(self, source: Tensor, lengths: Tensor, vocabulary: Tensor | None = None) -> DecoderState:
        """Encode source tokens: int64 (B, S), lengths int64 (B,) on the CPU -> the decoder's initial state. With a
        shortlist `vocabulary`, int64 (L,), ascending, only its tokens can be generated or copied."""
        parameters, decoder, embedded = self._parameters, self.model.decoder, self.model.source_embedding(source)
        if vocabulary is not None:
            table = self._table.index_select(0, vocabulary)
            few = len(source) * self._hypotheses < MIN_ROWS
            parameters = replace(
                parameters,
                words=parameters.words._replace(vocabulary=vocabulary),
                predict=parameters.predict._replace(
                    weight=table if few else cast(Tensor, self._pack(table, self._bounded)),
                    bias=parameters.predict.bias.index_select(0, vocabulary),
                ),
            )
            if decoder.copy is not None:
                source = within(source, vocabulary)
        encoded = self.model.encoder(embedded, lengths, self._encoder_layers)
        state = decoder.initial_state(
            self.model.bridge(encoded.summary), encoded, parameters, source, embedded
        ).deferred()
        # Cast the embedded source and multiply the fixed vector here once, instead of at every step.
        if state.source is not None and state.source.words is not None:
            words = in_autocast_dtype(state.source.words)
            state = state._replace(source=state.source._replace(words=words))
        fixed = state.hypothesis.fixed
        if fixed is not None:
            fixed = linear(in_autocast_dtype(fixed), parameters.context)
            state = state._replace(hypothesis=state.hypothesis._replace(fixed=fixed))
        return state

    def step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        """Decode a step: previous tokens int64 (N,) -> logits (N, V) of the next token, attention weights, next state.
        With a shortlist, tokens are positions in it, and the logits are (N, L)."""
        parameters, fixed = state.parameters, state.hypothesis.fixed
        assert isinstance(parameters, SearchParameters)
        # A latent decoder computes the posterior of the previous step's position now that its token is known.
        state = self.model.decoder.observe(state, tokens, parameters.predict)
        words = parameters.words(tokens)  # (N, G + P): what the words add to gates and readout
        if fixed is not None:  # the same for the fixed vector of a model without attention, multiplied in `encode`
            words = words + fixed
        G = len(parameters.word)
        word = WordProducts(gates=words[:, :G], readout=words[:, G:])
        prediction, weights, state = self.model.decoder.step(word, state)
        return StepOutput(prediction.logits(parameters.predict).flatten(0, -2), weights, state)


def _packed(layer: LayerParameters, pack: Pack) -> LayerParameters:
    """Pack the parameters of a layer, whose hidden states lie between -1 and 1."""
    assert isinstance(layer.weight_ih, Tensor)
    return layer._replace(weight_ih=pack(layer.weight_ih.contiguous()), weight_hh=pack(layer.weight_hh, bounded=True))


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _packed_copy(module: ModuleT, pack: Pack) -> ModuleT:
    """Copy a module. The copy shares the parameters, and its linear layers multiply with packed ones."""
    copied = deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    for layer in copied.modules():
        if isinstance(layer, Linear):
            layer.operands = pack(in_autocast_dtype(layer.weight.detach())), layer.bias
    return copied


class SearchModels:
    """Makes the search model of each beam size and keeps it, until torch has recorded a change of parameters."""

    def __init__(self, model: Seq2Seq | Ensemble, machine: Machine) -> None:
        self._model, self._machine = model, machine
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Discard the models, which frees their packed parameters."""
        self._versions: list[tuple[int, int]] = []
        self._by_beam_size: dict[int, SearchModel | SearchEnsemble] = {}

    def get(self, beam_size: int) -> SearchModel | SearchEnsemble:
        """Return the search model of this beam size."""
        with self._lock:
            versions = [(weight.data_ptr(), weight._version) for weight in self._model.parameters()]
            if versions != self._versions:
                self.clear()
                self._versions = versions
            if beam_size not in self._by_beam_size:
                if len(self._by_beam_size) == MAX_KEPT:
                    self._by_beam_size.clear()
                with self._machine.autocast():
                    packing = pack_int8 if self._machine.int8 else pack
                    members = [SearchModel(member, beam_size, packing) for member in self._model.models]
                self._by_beam_size[beam_size] = members[0] if len(members) == 1 else SearchEnsemble(members)
            return self._by_beam_size[beam_size]
