"""Builds a model, and an attention, from their sections of the configuration."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nmt.attention import normalizers, scores
from nmt.attention.alignment import Alignment, Policy, SampledAlignment, StraightThroughAlignment
from nmt.attention.attention import Attention, MultiHeadAttention
from nmt.attention.windows import GlobalWindow, LocalMonotonicWindow, LocalPredictiveWindow, Window
from nmt.config.schema import model as schema
from nmt.config.schema.base import Section
from nmt.model.decoder import Decoder
from nmt.model.latent import InferenceNetwork, LatentDecoder, LatentPosition
from nmt.model.output import CopyGate, LexicalModel, Output, Readout
from nmt.model.recurrent import Bridge, Encoder, Recurrent, SelfAttention, UpperLayers
from nmt.model.seq2seq import EmbeddingDropout, Seq2Seq
from nmt.ops.draws import Dropout

# The parts of an attention: the section of the configuration that chooses a part, and the class that it configures.
SCORES: dict[type[Section], type[scores.Score]] = {
    schema.DotScore: scores.DotScore,
    schema.ScaledDotScore: scores.ScaledDotScore,
    schema.GeneralScore: scores.GeneralScore,
    schema.AdditiveScore: scores.AdditiveScore,
    schema.NormedAdditiveScore: scores.NormedAdditiveScore,
    schema.ConcatScore: scores.ConcatScore,
    schema.CosineScore: scores.CosineScore,
    schema.LocationScore: scores.LocationScore,
    schema.LocationAwareScore: scores.LocationAwareScore,
    schema.GaussianMixtureScore: scores.GaussianMixtureScore,
}
WINDOWS: dict[type[Section], type[Window]] = {
    schema.GlobalWindow: GlobalWindow,
    schema.LocalMonotonicWindow: LocalMonotonicWindow,
    schema.LocalPredictiveWindow: LocalPredictiveWindow,
}
NORMALIZERS: dict[type[Section], type[normalizers.Normalizer]] = {
    schema.Softmax: normalizers.SoftmaxNormalizer,
    schema.Sparsemax: normalizers.SparsemaxNormalizer,
    schema.Entmax15: normalizers.EntmaxNormalizer,
    schema.FirstOrder: normalizers.FirstOrderNormalizer,
    schema.Monotonic: normalizers.MonotonicNormalizer,
    schema.Mocha: normalizers.MonotonicNormalizer,  # its weights are then spread over chunks
    schema.LinearChain: normalizers.LinearChainNormalizer,
    schema.Fertility: normalizers.FertilityNormalizer,
}
ALIGNMENTS: dict[type[Section], type[Alignment]] = {
    schema.Sampled: SampledAlignment,
    schema.StraightThrough: StraightThroughAlignment,
    schema.Marginal: Alignment,
    schema.Variational: Alignment,
    schema.Posterior: Alignment,
}
CELLS: dict[str, type[Recurrent]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
Part = TypeVar("Part", bound=nn.Module)


def build_model(config: schema.Model, source_vocab: int, target_vocab: int, pad: tuple[int, int]) -> Seq2Seq:
    """Build a new model with random parameters from torch's global generator. pad: ids of source and target padding."""
    model = _build_modules(config, source_vocab, target_vocab, pad)
    initialize(model)
    return model


def build_unfilled(config: schema.Model, source_vocab: int, target_vocab: int, pad: tuple[int, int]) -> Seq2Seq:
    """Build a model like `build_model`, but with uninitialised parameters, to be filled from a checkpoint. It skips the
    functions of torch.nn.init: on the device "meta" they would import torch's compiler, which takes a second."""
    with _Unfilled():
        return _build_modules(config, source_vocab, target_vocab, pad)


class _Unfilled(TorchFunctionMode):
    """Turns the functions of torch.nn.init into no-ops."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def _build_modules(config: schema.Model, source_vocab: int, target_vocab: int, pad: tuple[int, int]) -> Seq2Seq:
    embedding, attention = config.embedding, config.attention
    source_embedding = nn.Embedding(source_vocab, embedding.dim, padding_idx=pad[0])
    target_embedding = source_embedding
    if not embedding.tie_source_target:
        target_embedding = nn.Embedding(target_vocab, embedding.dim, padding_idx=pad[1])
    encoder = _encoder(config)
    decoder = _decoder(config, encoder)
    output = Output(config.decoder.readout_dim, target_vocab, config.decoder.fixnorm)
    if embedding.tie_output:
        output.weight = target_embedding.weight
    bridge = Bridge(encoder.summary_dim, config.decoder.layers, config.decoder.hidden, config.decoder.cell == "lstm")
    return Seq2Seq(
        source_embedding,
        target_embedding,
        encoder,
        bridge,
        decoder,
        output,
        build_policy(attention, config.decoder.hidden, target_vocab),
        _inference_network(config, encoder.output_dim),
        embedding_dropout=EmbeddingDropout(embedding.dropout, embedding.word_dropout),
    )


@torch.no_grad()
def initialize(model: Seq2Seq) -> None:
    """Set all parameters to random initial values.

    Matrices are Glorot-uniform, recurrent matrices orthogonal (Saxe et al. 2014), biases zero. Embeddings have a length
    of about 1, and the embedding of padding is 0. Scalars, layer norms and the bias of a policy's baseline keep the
    initial values of their modules.

    At first, an LSTM's input and output gates are half open, so that its output is about a quarter of its candidate and
    the output of several layers hardly depends on the words. Therefore the candidate's input matrix is multiplied by 4.
    """
    tables = {model.source_embedding.weight, model.target_embedding.weight}
    for name, parameter in model.named_parameters():
        if parameter in tables or parameter.dim() == 0 or ".norm." in name or name == "policy.learned.bias":
            continue
        if "weight_hh" in name:
            for gate in torch.split(parameter, parameter.shape[1]):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            network = model.encoder if name.startswith("encoder") else model.decoder
            number = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}[type(network.rnn)]  # all layers of a network have one type
            gates = torch.split(parameter, parameter.shape[0] // number)
            for gate in gates:
                nn.init.xavier_uniform_(gate)
            if len(gates) == 4:  # noqa: PLR2004
                gates[2].mul_(4)  # the candidate of an LSTM
        elif parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    for embedding in (model.source_embedding, model.target_embedding):
        nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5)
        embedding.weight[embedding.padding_idx] = 0.0


def _encoder(config: schema.Model) -> Encoder:
    encoder = config.encoder
    if encoder.bidirectional == "first":
        rnn = _recurrent_network(encoder, config.embedding.dim, layers=1, bidirectional=True)
        upper = _upper_layers(encoder, [2 * encoder.hidden] + [encoder.hidden] * (encoder.layers - 2))
    else:
        rnn, upper = _recurrent_network(encoder, config.embedding.dim, encoder.layers, encoder.bidirectional), None
    attention, dim = encoder.self_attention, encoder.output_dim
    layers: list[SelfAttention] = []
    if isinstance(attention, schema.EncoderSelfAttention):
        layers = [
            SelfAttention(build_attention(attention, dim, dim), dim, Dropout(encoder.dropout))
            for _ in range(attention.layers)
        ]
    return Encoder(rnn, config.decoder.bridge, layers, upper, residual=encoder.first_residual, dropout=encoder.dropout)


def _decoder(config: schema.Model, encoder: Encoder) -> Decoder:
    decoder, word_dim = config.decoder, config.embedding.dim
    attention, context_dim = None, 0
    if config.attention.kind == "attention":
        attention = build_attention(config.attention, decoder.hidden, encoder.output_dim)
        context_dim = encoder.output_dim
    elif config.attention.context == "every_step":
        context_dim = encoder.summary_dim
    # The input is [word; fixed vector, or the context with attend=before; previous readout with input feeding].
    has_context = attention is None or decoder.attend == "before"
    input_dim = word_dim + (context_dim if has_context else 0) + (decoder.readout_dim if decoder.input_feeding else 0)
    upper = None
    if decoder.attend == "first_layer":
        upper = _upper_layers(decoder, [decoder.hidden + context_dim] * (decoder.layers - 1))
    rnn = _recurrent_network(decoder, input_dim, decoder.layers if upper is None else 1)
    conditional = None
    if decoder.attend == "between":
        conditional = CELLS[decoder.cell](context_dim, decoder.hidden, batch_first=True)
    readout = Readout(decoder.readout, decoder.hidden, context_dim, word_dim, decoder.readout_dim)
    latent = _latent_position(config.attention)
    build = Decoder if latent is None else partial(LatentDecoder, latent=latent)
    return build(
        rnn,
        attention,
        readout,
        conditional,
        LexicalModel(word_dim) if decoder.lexical else None,
        upper,
        CopyGate(decoder.readout_dim) if decoder.copy else None,
        attend=decoder.attend,
        input_feeding=decoder.input_feeding,
        residual=decoder.first_residual,
        dropout=decoder.dropout,
    )


def _latent_position(attention: schema.Attention) -> LatentPosition | None:
    if not isinstance(attention, schema.ScoredAttention):
        return None
    match alignment := attention.alignment:
        case schema.Posterior():
            reads_more = attention.score.reads_past or attention.coverage.kind != "none"
            first_order = attention.normalizer.kind == "first_order" and not reads_more
            return LatentPosition(alignment.top_k, alignment.min_share, True, alignment.prior_share, first_order)
        case schema.Marginal() | schema.Variational():
            return LatentPosition(alignment.top_k, alignment.min_share)
    return None


def _inference_network(config: schema.Model, memory_dim: int) -> InferenceNetwork | None:
    attention, decoder = config.attention, config.decoder
    if not isinstance(attention, schema.ScoredAttention) or not isinstance(attention.alignment, schema.Variational):
        return None
    alignment = attention.alignment
    rnn = CELLS[decoder.cell](config.embedding.dim, alignment.dim, batch_first=True, bidirectional=True)
    return InferenceNetwork(rnn, memory_dim, Dropout(decoder.dropout), sample=alignment.estimator == "sample")


def _recurrent_network(network: schema.Network, input_dim: int, layers: int, bidirectional: bool = False) -> Recurrent:
    options = {"dropout": network.dropout if layers > 1 else 0.0, "bidirectional": bidirectional}
    return CELLS[network.cell](input_dim, network.hidden, layers, batch_first=True, **options)


def _upper_layers(network: schema.Network, input_dims: list[int]) -> UpperLayers:
    """Build the layers above the first. input_dims: the width of the input of each, the lowest first."""
    layers = [_recurrent_network(network, input_dim, layers=1) for input_dim in input_dims]
    return UpperLayers(layers, network.first_residual, network.dropout)


def build_attention(
    config: schema.ScoredAttention | schema.EncoderSelfAttention, query_dim: int, memory_dim: int
) -> Attention | MultiHeadAttention:
    """Build an attention of queries (B, T, query_dim) over states (B, S, memory_dim) -> contexts (B, T, memory_dim)."""
    projection = config.projection
    if isinstance(projection, schema.NoHeads):
        return _attention(config, query_dim, memory_dim)
    size = projection.dim // projection.heads
    inner = _attention(config, size, size)
    return MultiHeadAttention(inner, query_dim, memory_dim, projection.dim, projection.heads)


def build_policy(config: schema.Attention, query_dim: int, vocabulary: int) -> Policy | None:
    """Build the policy that trains sampled positions; None for any other alignment."""
    if not isinstance(config, schema.ScoredAttention) or not isinstance(config.alignment, schema.Sampled):
        return None
    options = {"discount": config.alignment.discount, "entropy_weight": config.alignment.entropy_weight}
    return Policy(query_dim, config.alignment.baseline, vocabulary=vocabulary, **options)


def _attention(
    config: schema.ScoredAttention | schema.EncoderSelfAttention, query_dim: int, memory_dim: int
) -> Attention:
    sizes = {"query_dim": query_dim, "memory_dim": memory_dim}
    score = _part(SCORES, config.score, **sizes)
    window, normalizer = _part(WINDOWS, config.window, **sizes), _part(NORMALIZERS, config.normalizer)
    if isinstance(config, schema.EncoderSelfAttention):
        return Attention(score, window, normalizer, dropout=config.dropout)
    coverage = chunk = None
    if config.coverage.kind == "linear":
        with torch.no_grad():
            keys = score.keys(torch.zeros(1, 1, memory_dim))
        coverage = scores.LinearCoverage(keys.shape[-1])
    if config.normalizer.kind == "mocha":
        chunk = normalizers.Chunk(_part(SCORES, config.score, **sizes), config.normalizer.chunk)
    chosen = None if config.alignment.kind == "expected" else _part(ALIGNMENTS, config.alignment)
    return Attention(score, window, normalizer, chosen, coverage, config.dropout, chunk, config.reads_past)


def _part(table: Mapping[type[Section], type[Part]], section: Section, **sizes: int) -> Part:
    """Call the class that the table has for a section with those of the sizes and settings that it takes, by name."""
    part = table[type(section)]
    values = sizes | dict(section)
    return part(**{name: values[name] for name in signature(part).parameters if name in values})
