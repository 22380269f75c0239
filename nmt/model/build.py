"""From a configuration to a model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nmt.attention.build import build_attention, build_policy
from nmt.config.schema.model import (
    Attention,
    EncoderSelfAttention,
    Marginal,
    Model,
    Network,
    Posterior,
    ScoredAttention,
    Variational,
)
from nmt.model.decoder import Decoder
from nmt.model.encoder import Encoder, SelfAttention
from nmt.model.latent import InferenceNetwork, LatentDecoder, LatentPosition
from nmt.model.prediction import CopyGate
from nmt.model.readout import LexicalModel, Output, Readout
from nmt.model.recurrent import Recurrent, RecurrentOptions, UpperLayers
from nmt.model.seq2seq import Bridge, EmbeddingDropout, Seq2Seq
from nmt.ops.draws import Dropout

CELLS: dict[str, type[Recurrent]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def build_model(config: Model, source_vocab: int, target_vocab: int, pad: tuple[int, int]) -> Seq2Seq:
    """A new model with random weights from torch's global generator; `pad` = source and target padding ids."""
    model = _modules(config, source_vocab, target_vocab, pad)
    initialize(model)
    return model


def build_unfilled(config: Model, source_vocab: int, target_vocab: int, pad: tuple[int, int]) -> Seq2Seq:
    """The same model with uninitialised weights, to be filled from a checkpoint. Skipping torch.nn.init avoids
    importing torch's compiler on the device "meta", which takes a second."""
    with _Unfilled():
        return _modules(config, source_vocab, target_vocab, pad)


class _Unfilled(TorchFunctionMode):
    """Turns the functions of torch.nn.init into no-ops."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        options = kwargs or {}
        if getattr(function, "__module__", "") == nn.init.__name__:
            return args[0] if args else options["tensor"]
        return function(*args, **options)


def _modules(config: Model, source_vocab: int, target_vocab: int, pad: tuple[int, int]) -> Seq2Seq:
    embedding, attention = config.embedding, config.attention
    source_embedding = nn.Embedding(source_vocab, embedding.dim, padding_idx=pad[0])
    target_embedding = source_embedding
    if not embedding.tie_source_target:
        target_embedding = nn.Embedding(target_vocab, embedding.dim, padding_idx=pad[1])
    encoder = _encoder(config)
    attend = attention.kind == "attention"
    fixed = attention.kind == "none" and attention.context == "every_step"
    context_dim = encoder.output_dim if attend else encoder.summary_dim if fixed else 0
    decoder = _decoder(config, encoder, context_dim)
    output = Output(config.decoder.readout_dim, target_vocab, config.decoder.fixnorm)
    if embedding.tie_output:
        output.weight = target_embedding.weight
    bridge = Bridge(encoder.summary_dim, config.decoder.layers, config.decoder.hidden, config.decoder.cell == "lstm")
    model = Seq2Seq(
        source_embedding,
        target_embedding,
        encoder,
        bridge,
        decoder,
        output,
        build_policy(attention, config.decoder.hidden),
        _inference(config, encoder.output_dim),
        embedding_dropout=EmbeddingDropout(embedding.dropout, embedding.word_dropout, config.variational_dropout),
        fixed_context=fixed,
    )
    if model.inference is not None:
        model.record_log_weights()  # of the prior, for the divergence from it
    return model


@torch.no_grad()
def initialize(model: Seq2Seq) -> None:
    """Glorot-uniform matrices, orthogonal recurrent ones (Saxe et al. 2014), zero biases, embeddings of about unit
    length, zero for padding. Scalars and layer norms keep their own initial values.

    An LSTM's input and output gates are half open at first, so that its output is about a quarter of its candidate, and
    a stack of layers hardly sees the words. The candidate's input weights are therefore 4 times as large."""
    embeddings = {model.source_embedding, model.target_embedding}
    tables = [embedding.weight for embedding in embeddings]
    for name, parameter in model.named_parameters():
        if any(parameter is table for table in tables) or parameter.dim() == 0 or ".norm." in name:
            continue
        if "weight_hh" in name:
            for gate in torch.split(parameter, parameter.shape[1]):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            hidden = parameter.shape[0] // _gates(model, name)
            gates = torch.split(parameter, hidden)
            for gate in gates:
                nn.init.xavier_uniform_(gate)
            if len(gates) == 4:  # noqa: PLR2004
                gates[2].mul_(4)  # the candidate's
        elif parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    for embedding in (model.source_embedding, model.target_embedding):
        nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5)
        embedding.weight[embedding.padding_idx] = 0.0


def _gates(model: Seq2Seq, name: str) -> int:
    rnn = model.encoder.rnn if name.startswith("encoder") else model.decoder.rnn  # `conditional` has the decoder's cell
    return {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}[type(rnn)]


def _encoder(config: Model) -> Encoder:
    encoder = config.encoder
    if encoder.bidirectional == "first":
        rnn = _recurrent(encoder, config.embedding.dim, 1, bidirectional=True)
        upper = _upper_layers(config, encoder, [2 * encoder.hidden] + [encoder.hidden] * (encoder.layers - 2))
    else:
        rnn, upper = _recurrent(encoder, config.embedding.dim, encoder.layers, encoder.bidirectional), None
    attention, dim = encoder.self_attention, encoder.output_dim
    layers: list[SelfAttention] = []
    if isinstance(attention, EncoderSelfAttention):
        layers = [
            SelfAttention(
                build_attention(attention, dim, dim), dim, Dropout(encoder.dropout, config.variational_dropout)
            )
            for _ in range(attention.layers)
        ]
    return Encoder(rnn, config.decoder.bridge, layers, _options(config, encoder), upper)


def _decoder(config: Model, encoder: Encoder, context_dim: int) -> Decoder:
    decoder, word_dim = config.decoder, config.embedding.dim
    attention = None
    if config.attention.kind == "attention":
        attention = build_attention(config.attention, decoder.hidden, encoder.output_dim)
    # The input is [word; fixed vector, or context if the decoder attends before the step; previous readout if fed].
    has_context = attention is None or decoder.attend == "before"
    input_dim = word_dim + (context_dim if has_context else 0) + (decoder.readout_dim if decoder.input_feeding else 0)
    upper = None
    if decoder.attend == "first_layer":
        upper = _upper_layers(config, decoder, [decoder.hidden + context_dim] * (decoder.layers - 1))
    rnn = _recurrent(decoder, input_dim, decoder.layers if upper is None else 1)
    conditional = None
    if decoder.attend == "between":
        conditional = CELLS[decoder.cell](context_dim, decoder.hidden, batch_first=True)
    readout = Readout(decoder.readout, decoder.hidden, context_dim, word_dim, decoder.readout_dim)
    latent = _latent(config.attention)
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
        options=_options(config, decoder),
    )


def _latent(attention: Attention) -> LatentPosition | None:
    alignment = attention.alignment if isinstance(attention, ScoredAttention) else None
    match alignment:
        case Posterior():
            return LatentPosition(alignment.top_k, alignment.min_share, True, alignment.prior_share)
        case Marginal() | Variational():
            return LatentPosition(alignment.top_k, alignment.min_share)
    return None


def _inference(config: Model, memory_dim: int) -> InferenceNetwork | None:
    attention, decoder = config.attention, config.decoder
    if not isinstance(attention, ScoredAttention) or not isinstance(attention.alignment, Variational):
        return None
    alignment = attention.alignment
    rnn = CELLS[decoder.cell](config.embedding.dim, alignment.dim, batch_first=True, bidirectional=True)
    dropout = Dropout(decoder.dropout, config.variational_dropout)
    return InferenceNetwork(rnn, memory_dim, dropout, sample=alignment.estimator == "sample")


def _recurrent(network: Network, input_dim: int, layers: int, bidirectional: bool = False) -> Recurrent:
    rnn = CELLS[network.cell](input_dim, network.hidden, layers, batch_first=True, bidirectional=bidirectional)
    rnn.dropout = network.dropout if network.layers > 1 else 0.0  # torch warns of an argument `dropout` with one layer
    return rnn


def _upper_layers(config: Model, network: Network, input_dims: list[int]) -> UpperLayers:
    return UpperLayers([_recurrent(network, dim, 1) for dim in input_dims], _options(config, network))


def _options(config: Model, network: Network) -> RecurrentOptions:
    return RecurrentOptions(
        variational=config.variational_dropout,
        recurrent_dropout=network.recurrent_dropout,
        zoneout=network.zoneout,
        weight_drop=network.weight_drop,
        layer_norm=network.layer_norm,
        residual=network.first_residual,
        transition_depth=network.transition_depth,
        dropout=network.dropout,
    )
