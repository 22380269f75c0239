"""A model prepared for search: what every step would compute again is computed once, and parameters are packed.

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

from nmt.attention.attention import Attended, Attention, Memory, MultiHeadAttention
from nmt.attention.scores import Past
from nmt.model.decoder import BatchProducts, DecoderState, Products
from nmt.model.output import OutputLayer, within
from nmt.model.recurrent import PreparedLayer, prepare_layers
from nmt.model.seq2seq import Ensemble, SearchEnsemble, Seq2Seq, StepOutput
from nmt.ops.packed import Pack, pack, pack_int8
from nmt.ops.products import Linear, Weight, in_autocast_dtype, linear
from nmt.system.machine import Machine

MIN_ROWS = 32  # least number of rows of a step for which it pays to pack a shortlist's part of the output table
MAX_PREPARED = 4  # prepared models that are kept, one for each beam size
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
class SearchProducts(Products):
    """The products of a prepared model, made once for all searches. Words (N, G + R) and contexts (N, C + R) arrive
    already multiplied with the parameters of the gates and the readout."""

    words: Words
    output: OutputLayer  # parameters of the logits; with a shortlist, only those of its L tokens
    state: Weight  # (R, H): parameters of the readout for the output of the top layer
    feed: Weight | None  # (G, R): parameters of the gates for the previous readout; None if it is not fed back
    gates: int  # width G of the gates in a word's product
    context_gates: int  # width C of a context's contribution to the recurrent layers

    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """Add the gates of words and of the fixed vectors: (N, G + R), (N, C + R) or None -> (N, G)."""
        gates = word[:, : self.gates]
        return gates if fixed is None else gates + fixed[:, : self.context_gates]

    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """Add the gates of contexts and of previous readouts: (N, C + R) or None, (N, R) or None -> (N, G) or None."""
        gates = None if context is None else context[:, : self.context_gates]
        if feed is None or self.feed is None:
            return gates
        fed = linear(feed, self.feed)
        return fed if gates is None else fed + gates

    def conditional_gates(self, context: Tensor) -> Tensor:
        """Select the gates of contexts, and add the bias: (N, C + R) -> (N, G)."""
        assert self.conditional is not None
        return context[:, : self.context_gates] + self.conditional.bias_ih

    def upper_input(self, context: Tensor) -> Tensor:
        """Select the contexts themselves, as C is M here: (N, C + R) -> (N, M)."""
        return context[:, : self.context_gates]

    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """Read out: outputs (N, H) of the top layer, contexts (N, C + R) or None, words (N, G + R) -> (N, R)."""
        projected = self.read_out_partly(output, word)
        if context is not None:
            projected = projected + context[:, self.context_gates :]
        return self.readout.activation(projected)

    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """Add what outputs and words give to the readout: (..., H), (..., G + R) -> (..., R)."""
        return linear(output, self.state) + word[..., self.gates :]

    def contexts(self, values: Tensor) -> Tensor:
        """Select what each position's value gives to the readout: (B, S, C + R) -> (B, S, R)."""
        return values[..., self.context_gates :].contiguous()


class SearchAttention:
    """An attention whose contexts are multiplied with the parameters of the gates and the readout: at every step, or,
    if several hypotheses share a memory or a prediction needs the product of every source position, once for each
    sentence by multiplying the memory. Contexts of several heads are always multiplied at every step.
    """

    def __init__(
        self, trained: Attention | MultiHeadAttention, weight: Tensor, hypotheses: int, pack: Pack, positions: bool
    ) -> None:
        """weight: the parameters (C + R, M) that multiply contexts; hypotheses: their number for each sentence;
        positions: whether a prediction needs the product of every source position."""
        self.inner, self.reads_past = _packed_copy(trained, pack), trained.reads_past
        shared = not trained.reads_past and hypotheses > 1
        self.projects_memory = isinstance(trained, Attention) and (shared or positions)
        self.weight = pack(weight)

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory:
        """Make the memory of encoder states: (B, S, M), bool (B, S) -> Memory; see `Attention.remember`."""
        if isinstance(self.inner, Attention) and self.projects_memory:
            values = linear(in_autocast_dtype(states), self.weight)
            return self.inner.remember(states, valid, values, nonempty=nonempty)
        return self.inner.remember(states, valid, nonempty=nonempty)

    def start(self, valid: Tensor) -> Past:
        """Make the past before the first step: bool (B, S) -> Past."""
        return self.inner.start(valid)

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Attend with queries (B, K, Q) of K hypotheses of each sentence -> Attended, with contexts (B, K, C + R)."""
        attended = self.inner.step(query, memory, past)
        return attended if self.projects_memory else attended._replace(context=linear(attended.context, self.weight))


class SearchModel:
    """Computes, step by step, what a Seq2Seq in evaluation mode computes, until the Seq2Seq's parameters change. Make
    and use it within the same precision (`Machine.autocast`)."""

    @torch.no_grad()
    def __init__(self, model: Seq2Seq, hypotheses: int, pack: Pack) -> None:
        """hypotheses: number of hypotheses of each sentence, which share its memory if the attention allows it."""
        assert not model.training
        self.model = model
        self._pack, self._hypotheses = pack, hypotheses
        self._encoder_layers = prepare_layers(model.encoder.rnn, model.encoder.residual)
        readout, output = model.decoder.readout, model.output.layer()
        self._table = in_autocast_dtype(output.weight)  # (V, R)
        self._bounded = readout.kind != "maxout" and model.decoder.lexical is None and output.scale is None
        self._products, self._fixed = self._prepare(output)

    def _prepare(self, output: OutputLayer) -> tuple[SearchProducts, Tensor]:
        """Make the products of all steps, and the parameters (C + R, M) that multiply contexts."""
        decoder, pack = self.model.decoder, self._pack
        embedding = in_autocast_dtype(self.model.target_embedding.weight)
        _, M, _ = decoder.readout.sizes
        batch = decoder.prepare()
        of_readout = in_autocast_dtype(decoder.readout.proj.weight)
        state, of_context, of_word = torch.split(of_readout, list(decoder.readout.sizes), dim=1)
        gates, feed = _context_gates(decoder.attend, decoder.fixed_dim > 0, batch, M)
        context = torch.cat([gates, of_context]).contiguous()
        attention = None
        if decoder.attention is not None:
            attention = SearchAttention(decoder.attention, context, self._hypotheses, pack, decoder.sums_over_positions)
        if of_word.shape[1] == 0:
            of_word = of_word.new_zeros(len(of_readout), embedding.shape[1])
        first = batch.layers[0]
        words = torch.cat([batch.word, of_word])
        word_bias = torch.cat([first.bias_ih.to(words.dtype), in_autocast_dtype(decoder.readout.proj.bias)])
        table = None
        if len(embedding) * len(words) <= MAX_TABLE:
            table = linear(embedding, words, word_bias)
        products = SearchProducts(
            layers=[_packed(layer, pack) for layer in batch.layers],
            conditional=None if batch.conditional is None else _packed(batch.conditional, pack),
            readout=decoder.readout,
            attention=attention,
            lexical=None if decoder.lexical is None else _packed_copy(decoder.lexical, pack),
            words=Words(embedding, pack(words) if table is None else words, word_bias, table),
            output=output._replace(weight=cast(Tensor, pack(self._table, self._bounded))),
            state=pack(state.contiguous(), bounded=not decoder.residual),
            feed=None if feed is None else pack(feed.contiguous(), bounded=decoder.readout.kind != "maxout"),
            gates=len(batch.word),
            context_gates=len(gates),
        )
        return products, context

    def encode(self, source: Tensor, lengths: Tensor, *vocabulary: Tensor) -> DecoderState:
        """Encode source tokens: int64 (B, S), lengths int64 (B,) on the CPU -> the decoder's initial state. Of a
        shortlist, int64 (L,), ascending, only the tokens can be generated or copied."""
        products = self._products
        for tokens in vocabulary:
            table = self._table.index_select(0, tokens)
            few = len(source) * self._hypotheses < MIN_ROWS
            products = replace(
                products,
                words=products.words._replace(vocabulary=tokens),
                output=products.output._replace(
                    weight=table if few else cast(Tensor, self._pack(table, self._bounded)),
                    bias=products.output.bias.index_select(0, tokens),
                ),
            )
        decoder, embedded = self.model.decoder, self.model.source_embedding(source)
        encoded = self.model.encoder(embedded, lengths, self._encoder_layers)
        for tokens in vocabulary if decoder.copy is not None else ():
            source = within(source, tokens)
        state = decoder.start(self.model.bridge(encoded.summary), encoded, products, source, embedded).shared()
        # Cast the embedded source and multiply the fixed vector here once, instead of at every step.
        if state.source is not None and state.source.words is not None:
            words = in_autocast_dtype(state.source.words)
            state = state._replace(source=state.source._replace(words=words))
        fixed = state.hypothesis.fixed
        if fixed is not None:
            fixed = linear(in_autocast_dtype(fixed), self._fixed)
            state = state._replace(hypothesis=state.hypothesis._replace(fixed=fixed))
        return state

    def step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        """Decode a step: previous tokens int64 (N,) -> logits (N, V) of the next token, attention weights, next state.
        With a shortlist, tokens are positions in it, and the logits are (N, L)."""
        products, decoder = state.products, self.model.decoder
        assert isinstance(products, SearchProducts)
        state = decoder.observe(state, tokens, products.output)
        prediction, weights, state = decoder.step(products.words(tokens), state)
        return StepOutput(prediction.logits(products.output).flatten(0, -2), weights, state)


def _context_gates(attend: str, fixed: bool, batch: BatchProducts, M: int) -> tuple[Tensor, Tensor | None]:
    """Return the parameters that multiply a context for the recurrent layers (C, M), and those of the gates for the
    previous readout (G, R), None if it is not fed back. fixed: every step reads the encoder's summary as its context.
    """
    context, feed = batch.fed.new_empty(0, M), batch.fed
    if fixed:
        context = batch.fixed
    elif batch.conditional is not None:
        assert isinstance(batch.conditional.weight_ih, Tensor)
        context = batch.conditional.weight_ih
    elif attend == "first_layer":
        context = torch.eye(M, dtype=feed.dtype, device=feed.device)
    elif attend == "before":
        context, feed = feed[:, :M], feed[:, M:]
    return context, feed if feed.shape[1] else None


def _packed(layer: PreparedLayer, pack: Pack) -> PreparedLayer:
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


class PreparedModels:
    """Keeps the model prepared for a few beam sizes. Prepares it again if torch has recorded a change of parameters."""

    def __init__(self, model: Seq2Seq | Ensemble, machine: Machine) -> None:
        self._model, self._machine = model, machine
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Discard the prepared models."""
        self._versions: list[tuple[int, int]] = []
        self._prepared: dict[int, SearchModel | SearchEnsemble] = {}

    def get(self, beam_size: int) -> SearchModel | SearchEnsemble:
        """Return the model prepared for this beam size."""
        with self._lock:
            versions = [(weight.data_ptr(), weight._version) for weight in self._model.parameters()]
            if versions != self._versions:
                self.clear()
                self._versions = versions
            if beam_size not in self._prepared:
                if len(self._prepared) == MAX_PREPARED:
                    self._prepared.clear()
                with self._machine.autocast():
                    packing = pack_int8 if self._machine.int8 else pack
                    members = [SearchModel(member, beam_size, packing) for member in self._model.models]
                self._prepared[beam_size] = members[0] if len(members) == 1 else SearchEnsemble(members)
            return self._prepared[beam_size]
