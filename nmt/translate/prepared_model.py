"""A model prepared for search: what every step would compute again is computed once, and weights are packed.

Shapes: B batch, S source positions, T target positions, E embedding, H hidden, M memory, R readout (2 R before a
maxout), G gates x H, V vocabulary, L its part that a search may use, C what a context gives to the recurrent layers: G
for the gates of one, M itself where several layers read it, or nothing.
"""

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.attention.memory import Attended, Memory, Past
from nmt.model.cells import LayerWeights, Recurrent, norm_gates
from nmt.model.copying import Copying, within
from nmt.model.ensemble import Ensemble, SearchEnsemble
from nmt.model.latent.decoder import LatentDecoder
from nmt.model.latent.mixture import Mixture
from nmt.model.readout import Readout
from nmt.model.seq2seq import Seq2Seq
from nmt.model.state import BatchWeights, DecoderState
from nmt.model.stepping import StepOutput
from nmt.ops.linear import Linear, linear
from nmt.ops.mixture import mixture_log_probs, target_log_probs
from nmt.ops.packed import Pack, Weight
from nmt.ops.precision import in_autocast_dtype

MIN_ROWS = 32  # of a product, for which packing a shortlist's part of the output table pays
MAX_TABLE = 2**26  # numbers in the table of all words' products; with more, each step computes its own


class Words(NamedTuple):
    """What each word of the target vocabulary adds to the lowest layer's gates and to the readout."""

    embeddings: Tensor  # (V, E)
    weight: Weight  # (G + R, E)
    bias: Tensor  # (G + R,)
    table: Tensor | None  # (V, G + R), of all words
    vocabulary: Tensor | None = None  # int64 (L,): word l is token vocabulary[l]; None: all

    def __call__(self, words: Tensor) -> Tensor:
        """int64 (N,) -> (N, G + R)."""
        tokens = words if self.vocabulary is None else self.vocabulary[words]
        if self.table is not None:
            return self.table.index_select(0, tokens)
        return linear(self.embeddings.index_select(0, tokens), self.weight, self.bias)


class SearchWeights(NamedTuple):
    """See nmt.model.state.Weights. Here words are (N, G + R) and contexts (N, C + R), both already multiplied with the
    weights of the gates and the readout."""

    layers: list[LayerWeights]
    conditional: LayerWeights | None
    words: Words
    output: Weight  # (L, R)
    output_bias: Tensor  # (L,)
    readout: Readout
    state: Weight  # (R, H) of the readout
    feed: Weight | None  # (G, R), for the previous readout
    sizes: tuple[int, int]  # G, C
    word_mask: None = None
    readout_mask: None = None

    def word_gates(self, word: Tensor, fixed: Tensor | None) -> Tensor:
        """(N, G + R), (N, C + R) or None -> (N, G)."""
        gates = word[:, : self.sizes[0]]
        return gates if fixed is None else gates + fixed[:, : self.sizes[1]]

    def fed_gates(self, context: Tensor | None, feed: Tensor | None) -> Tensor | None:
        """(N, C + R) or None, (N, R) or None -> (N, G) or None."""
        gates = None if context is None else context[:, : self.sizes[1]]
        if feed is None or self.feed is None:
            return gates
        fed = linear(feed, self.feed)
        return fed if gates is None else fed + gates

    def conditional_gates(self, rnn: Recurrent, context: Tensor) -> Tensor:
        """(N, C + R) -> (N, G)."""
        assert self.conditional is not None
        gates = context[:, : self.sizes[1]]
        if self.conditional.norms is None:
            return gates + self.conditional.bias_ih
        return norm_gates(rnn, self.conditional, gates)

    def upper_input(self, context: Tensor) -> Tensor:
        """(N, C + R) -> (N, M)."""
        return context[:, : self.sizes[1]]

    def read_out(self, output: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """(N, H), (N, C + R) or None, (N, G + R) -> (N, R)."""
        projected = self.read_out_partly(output, word)
        if context is not None:
            projected = projected + context[:, self.sizes[1] :]
        return self.readout.activation(projected)

    def read_out_partly(self, output: Tensor, word: Tensor) -> Tensor:
        """(..., H), (..., G + R) -> (..., R)."""
        return linear(output, self.state) + word[..., self.sizes[0] :]

    def contexts(self, values: Tensor) -> Tensor:
        """(B, S, C + R) -> (B, S, R)."""
        return values[..., self.sizes[1] :].contiguous()


class SearchAttention(nn.Module):
    """An attention whose contexts are multiplied with the weights of the gates and the readout.

    Of several hypotheses that share a memory, the memory is multiplied instead, once per sentence.
    """

    def __init__(
        self, inner: Attention | MultiHeadAttention, weight: Tensor, hypotheses: int, pack: Pack, positions: bool
    ) -> None:
        """weight: (C + R, M); positions: does a prediction need the product of every position?"""
        super().__init__()
        self.inner, self.reads_past = inner, inner.reads_past
        shared = not inner.reads_past and hypotheses > 1
        self.projects_memory = isinstance(inner, Attention) and (shared or positions)
        self.weight = pack(weight)

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory:
        """(B, S, M), bool (B, S) -> Memory; see `Attention.remember`."""
        if isinstance(self.inner, Attention) and self.projects_memory:
            values = linear(in_autocast_dtype(states), self.weight)
            return self.inner.remember(states, valid, values, nonempty=nonempty)
        return self.inner.remember(states, valid, nonempty=nonempty)

    def start(self, valid: Tensor) -> Past:
        """bool (B, S) -> the past before the first step."""
        return self.inner.start(valid)

    def drop(self, weights: Tensor, memory: Memory) -> Tensor:
        """See `Attention.drop`; a search drops none."""
        return weights.to(memory.values.dtype)

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Queries (B, K, Q) of K hypotheses of each sentence -> Attended, with contexts (B, K, C + R)."""
        attended = self.inner.step(query, memory, past)
        return attended if self.projects_memory else attended._replace(context=linear(attended.context, self.weight))


def prepare_for_search(model: Seq2Seq | Ensemble, hypotheses: int, pack: Pack) -> "SearchModel | SearchEnsemble":
    """See SearchModel; an ensemble's members are prepared."""
    if isinstance(model, Ensemble):
        return SearchEnsemble([SearchModel(member, hypotheses, pack) for member in model.models])
    return SearchModel(model, hypotheses, pack)


class SearchModel:
    """The function of a Seq2Seq in evaluation mode at the time of construction, step by step.

    Construct and use it within the same precision (`Machine.autocast`).
    """

    @torch.no_grad()
    def __init__(self, model: Seq2Seq, hypotheses: int, pack: Pack) -> None:
        """hypotheses: of each sentence, which share its memory if the attention allows it."""
        assert not model.training
        self.model = _shallow_copy(model)
        self.attends = model.attends
        for part in (self.model.decoder.attention, self.model.decoder.lexical):
            for layer in () if part is None else part.modules():
                if isinstance(layer, Linear):
                    layer.packed = pack(in_autocast_dtype(layer.weight.detach()))
        encoder = self.model.encoder
        encoder.layers = encoder.regularisation.prepare(encoder.rnn, 1)
        self._pack, self._hypotheses = pack, hypotheses
        self._table = in_autocast_dtype(model.output.table())
        decoder, output = model.decoder, model.output
        self._bounded = decoder.readout.kind != "maxout" and decoder.lexical is None and output.scale is None
        self._weights, context = self._prepare()
        self._fixed = None
        if self.model.decoder.attention is not None:
            positions = isinstance(model.decoder, LatentDecoder)
            search_attention = SearchAttention(self.model.decoder.attention, context, hypotheses, pack, positions)
            self.model.decoder.attention = search_attention  # type: ignore[assignment]
        elif model.fixed_context:
            self._fixed = context

    def _prepare(self) -> tuple[SearchWeights, Tensor]:
        """The weights of all steps, and those of a context (C + R, M)."""
        decoder, embedding = self.model.decoder, in_autocast_dtype(self.model.target_embedding.weight)
        _, M, _ = decoder.readout.sizes
        batch = decoder.weights(1, embedding.shape[1], M if self.model.fixed_context else 0)
        of_readout = in_autocast_dtype(decoder.readout.proj.weight)
        state, of_context, of_word = torch.split(of_readout, list(decoder.readout.sizes), dim=1)
        gates, feed = _context_gates(decoder.attend, self.model.fixed_context, batch, M)
        if of_word.shape[1] == 0:
            of_word = of_word.new_zeros(len(of_readout), embedding.shape[1])
        first = batch.layers[0]
        bias = first.bias_ih if first.norms is None else torch.zeros_like(first.bias_ih)
        words = torch.cat([batch.word, of_word])
        word_bias = torch.cat([bias.to(words.dtype), in_autocast_dtype(decoder.readout.proj.bias)])
        table = None
        if len(embedding) * len(words) <= MAX_TABLE:
            table = linear(embedding, words, word_bias)
        weights = SearchWeights(
            layers=[_packed(layer, self._pack) for layer in batch.layers],
            conditional=None if batch.conditional is None else _packed(batch.conditional, self._pack),
            words=Words(embedding, self._pack(words) if table is None else words, word_bias, table),
            output=self._pack(self._table, self._bounded),
            output_bias=self.model.output.bias,
            readout=decoder.readout,
            state=self._pack(state.contiguous(), bounded=not decoder.regularisation.options.residual),
            feed=None if feed is None else self._pack(feed.contiguous(), bounded=decoder.readout.kind != "maxout"),
            sizes=(len(batch.word), len(gates)),
        )
        return weights, torch.cat([gates, of_context]).contiguous()

    def encode(self, source: Tensor, lengths: Tensor, *vocabulary: Tensor) -> DecoderState:
        """int64 (B, S), int64 (B,) on the CPU -> the decoder's initial state. vocabulary: int64 (L,), the tokens that
        the steps may use, ascending; without: all. Source tokens outside of it are not copied."""
        weights = self._weights
        for tokens in vocabulary:
            table = self._table.index_select(0, tokens)
            few = len(source) * self._hypotheses < MIN_ROWS
            weights = weights._replace(
                words=weights.words._replace(vocabulary=tokens),
                output=table if few else self._pack(table, self._bounded),
                output_bias=weights.output_bias.index_select(0, tokens),
            )
        embedded = self.model.source_embedding(source)
        for tokens in vocabulary if self.model.copies else ():
            source = within(source, tokens)
        state = self.model.encode_embedded(embedded, lengths, source, weights)
        words = None if state.words is None else in_autocast_dtype(state.words)
        fixed = None
        if state.fixed is not None and self._fixed is not None:
            fixed = linear(in_autocast_dtype(state.fixed), self._fixed)
        return state._replace(words=words, fixed=fixed)

    def step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        """Previous tokens, int64 (B,) -> logits (B, V) of the next token, attention weights, next state. With a
        vocabulary, tokens count within it and the logits are (B, L)."""
        weights = state.weights
        assert isinstance(weights, SearchWeights)
        output, scaled = (weights.output, weights.output_bias), self.model.output.scaled
        decoder = self.model.decoder
        if isinstance(decoder, LatentDecoder):

            def log_probs(readouts: Tensor, mixing: Tensor, tokens: Tensor) -> Tensor:
                return target_log_probs(scaled(readouts), *output, mixing, tokens)

            state = decoder.observe(state, tokens, log_probs)
        readout, attention, state = decoder.step(weights.words(tokens), state)
        if isinstance(readout, Mixture):
            rows, mixing = readout.readouts.flatten(0, 1), readout.weights.flatten(0, 1)
            return StepOutput(mixture_log_probs(scaled(rows), *output, mixing), attention, state)
        if isinstance(readout, Copying):
            mixed = readout.log_probs(linear(scaled(readout.readouts), *output))
            return StepOutput(mixed.flatten(0, 1), attention, state)
        return StepOutput(linear(scaled(readout), *output), attention, state)


def _context_gates(attend: str, fixed: bool, batch: BatchWeights, M: int) -> tuple[Tensor, Tensor | None]:
    """The context's weights of the gates (C, M), and the previous readout's (G, R) or None."""
    context, feed = batch.fed.new_empty(0, M), batch.fed
    if fixed:
        context = batch.fixed
    elif batch.conditional is not None:
        context = batch.conditional.weight_ih
    elif attend == "first_layer":
        context = torch.eye(M, dtype=feed.dtype, device=feed.device)
    elif attend == "before":
        context, feed = feed[:, :M], feed[:, M:]
    return context, feed if feed.shape[1] else None


def _packed(layer: LayerWeights, pack: Pack) -> LayerWeights:
    """Hidden states lie between -1 and 1."""
    transitions = tuple(step._replace(packed=pack(step.weight_hh, bounded=True)) for step in layer.transitions)
    weights = pack(layer.weight_ih.contiguous()), pack(layer.weight_hh, bounded=True)
    return layer._replace(packed_ih=weights[0], packed=weights[1], transitions=transitions)


def _shallow_copy(model: Seq2Seq) -> Seq2Seq:
    """New modules with the same parameters."""
    return deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
