"""Embeddings, encoder, decoder, and their fit to the attention."""

from collections.abc import Iterator
from typing import Literal

from nmt.config.schema.attention import Attention, SelfAttention, unequal_sizes
from nmt.config.schema.base import CountOrZero, Layers, LayersOrZero, Positive, Probability, Section, Units
from nmt.config.schema.data import VocabularySize

Cell = Literal["rnn", "gru", "lstm"]


class Size(Section):
    """Defaults of other groups that depend on the size."""

    vocab_size: VocabularySize
    lr: Positive


class SizeThresholds(Section):
    """The number of training pairs from which size=auto chooses each size."""

    small: CountOrZero
    base: CountOrZero
    large: CountOrZero


class Embedding(Section):
    dim: Units
    dropout: Probability
    word_dropout: Probability
    tie_source_target: bool
    tie_output: bool


class Network(Section):
    """Common values of the recurrent networks of encoder and decoder."""

    cell: Cell
    hidden: Units
    layers: Layers
    dropout: Probability
    recurrent_dropout: Probability
    zoneout: Probability
    weight_drop: Probability
    layer_norm: bool
    residual: bool
    transition_depth: LayersOrZero

    def conflicts(self) -> Iterator[str]:
        if self.residual and self.layers == 1:
            yield (
                "residual=true adds a layer's output to its input from the second layer on, but layers=1; set layers=2 "
                "or more, or residual=false"
            )


class Encoder(Network):
    bidirectional: bool
    self_attention: SelfAttention

    @property
    def output_dim(self) -> int:
        """M: the size of one encoder state, both directions together."""
        return self.hidden * (2 if self.bidirectional else 1)


class Decoder(Network):
    attend: Literal["before", "between", "after"]
    input_feeding: bool
    readout: Literal["attentional", "deep", "maxout"]
    readout_dim: Units
    lexical: bool
    fixnorm: bool
    bridge: Literal["final", "mean"]


class Model(Section):
    """The values that determine the network's parameters and dropout."""

    variational_dropout: bool
    embedding: Embedding
    encoder: Encoder
    decoder: Decoder
    attention: Attention

    def conflicts(self) -> Iterator[str]:
        attention, decoder = self.attention, self.decoder
        memory, query = self.encoder.output_dim, decoder.hidden
        if attention.kind == "none" and decoder.attend != "after":
            yield f"decoder.attend={decoder.attend} needs an attention, but attention.kind=none; set it to after"
        if attention.kind == "none" and self.encoder.self_attention.kind != "none" and decoder.bridge == "final":
            yield (
                "encoder.self_attention changes the encoder's states, but with attention.kind=none and "
                "decoder.bridge=final nothing reads them; set decoder.bridge=mean"
            )
        if attention.kind == "attention" and unequal_sizes(attention.score.kind, attention.projection, query, memory):
            directions = 2 if self.encoder.bidirectional else 1
            yield (
                f"attention.score.kind={attention.score.kind} compares vectors of equal size, but "
                f"decoder.hidden={query} and encoder.hidden={self.encoder.hidden} x {directions} directions "
                f"= {memory}; set decoder.hidden={memory}, or use attention/score=general or attention/projection=heads"
            )
        if self.embedding.tie_output and decoder.readout_dim != self.embedding.dim:
            yield (
                f"embedding.tie_output=true needs decoder.readout_dim={decoder.readout_dim} to equal "
                f"embedding.dim={self.embedding.dim}; set them equal, or embedding.tie_output=false"
            )
        if decoder.lexical and self.attention.kind == "none":
            yield "decoder.lexical=true needs an attention, but attention.kind=none; set it to false"
        if decoder.lexical and decoder.readout_dim != self.embedding.dim:
            yield (
                f"decoder.lexical=true adds a vector of embedding.dim={self.embedding.dim} to a readout of "
                f"decoder.readout_dim={decoder.readout_dim}; set them equal, or decoder.lexical=false"
            )
