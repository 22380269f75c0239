"""Embeddings, encoder, decoder, and their fit to the attention."""

from typing import Literal, Self

from pydantic import model_validator as validator

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

    @validator(mode="after")
    def _residual_has_layers(self) -> Self:
        if self.residual and self.layers == 1:
            raise ValueError(
                "residual=true adds a layer's output to its input from the second layer on, but layers=1; set layers=2 "
                "or more, or residual=false"
            )
        return self


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

    @validator(mode="after")
    def _sizes_fit(self) -> Self:
        memory, query = self.encoder.output_dim, self.decoder.hidden
        attention = self.attention
        if attention.kind == "none" and self.decoder.attend != "after":
            raise ValueError(
                f"decoder.attend={self.decoder.attend} is for an attention, but attention.kind=none; set it to after"
            )
        if attention.kind == "none" and self.encoder.self_attention.kind != "none" and self.decoder.bridge == "final":
            raise ValueError(
                "encoder.self_attention changes the encoder's states, but with attention.kind=none and "
                "decoder.bridge=final nothing reads them; set decoder.bridge=mean"
            )
        if attention.kind == "attention" and unequal_sizes(attention.score.kind, attention.projection, query, memory):
            directions = 2 if self.encoder.bidirectional else 1
            raise ValueError(
                f"attention.score.kind={attention.score.kind} compares vectors of equal size, but "
                f"decoder.hidden={query} and encoder.hidden={self.encoder.hidden} x {directions} directions "
                f"= {memory}; set decoder.hidden={memory}, or use attention/score=general or attention/projection=heads"
            )
        if self.embedding.tie_output and self.decoder.readout_dim != self.embedding.dim:
            raise ValueError(
                f"embedding.tie_output=true needs decoder.readout_dim={self.decoder.readout_dim} to equal "
                f"embedding.dim={self.embedding.dim}; set them equal, or embedding.tie_output=false"
            )
        return self

    @validator(mode="after")
    def _lexical_model_has_words(self) -> Self:
        if self.decoder.lexical and self.attention.kind == "none":
            raise ValueError("decoder.lexical=true reads the attended words, but attention.kind=none; set it to false")
        if self.decoder.lexical and self.decoder.readout_dim != self.embedding.dim:
            raise ValueError(
                f"decoder.lexical=true adds to a readout of decoder.readout_dim={self.decoder.readout_dim} a vector of "
                f"embedding.dim={self.embedding.dim}; set them equal, or decoder.lexical=false"
            )
        return self
