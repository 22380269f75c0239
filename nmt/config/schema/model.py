"""Embeddings, encoder, decoder, and their fit to the attention."""

import warnings
from collections.abc import Iterator
from typing import Literal

from nmt.config.errors import format_value
from nmt.config.schema.alignment import Latent
from nmt.config.schema.attention import Attention, ScoredAttention, SelfAttention, unequal_sizes
from nmt.config.schema.base import (
    Bidirectional,
    CountOrZero,
    FirstLayer,
    Layers,
    LayersOrZero,
    Positive,
    Probability,
    Section,
    Units,
    Vectors,
)
from nmt.config.schema.data import VocabularySize

Cell = Literal["rnn", "gru", "lstm"]
# Of Decoder.copy, which hides pydantic's former name of `model_copy`.
warnings.filterwarnings("ignore", message='Field name "copy" in "Decoder" shadows an attribute')


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
    pretrained: Vectors | None
    frozen: bool


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
    residual: FirstLayer
    transition_depth: LayersOrZero

    @property
    def first_residual(self) -> int:
        """The first layer, counted from 1, with a residual connection; 0: none."""
        return 2 * self.residual if isinstance(self.residual, bool) else self.residual

    def conflicts(self) -> Iterator[str]:
        if self.first_residual > self.layers:
            yield (
                f"residual={format_value(self.residual)} adds a layer's output to its input from layer "
                f"{self.first_residual} on, but layers={self.layers}; set layers={self.first_residual} or more, or "
                "residual=false"
            )


class Encoder(Network):
    bidirectional: Bidirectional
    self_attention: SelfAttention

    @property
    def directions(self) -> int:
        """The directions of the top layer."""
        return 2 if self.bidirectional is True else 1

    @property
    def output_dim(self) -> int:
        """M: the size of one encoder state, both directions together."""
        return self.hidden * self.directions

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.bidirectional == "first" and self.layers == 1:
            yield (
                "bidirectional=first needs layers in one direction above the first, but layers=1; set layers=2 or "
                "more, or bidirectional=true"
            )
        if self.bidirectional == "first" and self.first_residual == 2:  # noqa: PLR2004
            yield (
                f"residual={format_value(self.residual)} adds the output of the second layer to its input, which with "
                "bidirectional=first is twice as wide; set residual=3 or more, or bidirectional=true"
            )


class Decoder(Network):
    attend: Literal["before", "between", "after", "first_layer"]
    input_feeding: bool
    readout: Literal["attentional", "deep", "maxout"]
    readout_dim: Units
    lexical: bool
    copy: bool  # type: ignore[assignment]
    fixnorm: bool
    bridge: Literal["final", "mean"]

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.attend == "first_layer" and self.layers == 1:
            yield (
                "attend=first_layer feeds the context into the layers above the first, but layers=1; set layers=2 or "
                "more, or attend=after"
            )
        if self.attend == "first_layer" and self.input_feeding:
            yield (
                "input_feeding=true feeds the readout into the first layer, which with attend=first_layer reads the "
                "previous word alone; set input_feeding=false, or attend=after"
            )


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
            directions = self.encoder.directions
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
        if decoder.copy and attention.kind == "none":
            yield (
                "decoder.copy=true copies what the attention points at, but attention.kind=none; set it to false, or "
                "choose an attention"
            )
        if decoder.lexical and self.attention.kind == "none":
            yield "decoder.lexical=true needs an attention, but attention.kind=none; set it to false"
        if decoder.lexical and decoder.readout_dim != self.embedding.dim:
            yield (
                f"decoder.lexical=true adds a vector of embedding.dim={self.embedding.dim} to a readout of "
                f"decoder.readout_dim={decoder.readout_dim}; set them equal, or decoder.lexical=false"
            )
        if isinstance(attention, ScoredAttention) and isinstance(attention.alignment, Latent):
            yield from self._conflicts_of_latent_alignment(attention)

    def _conflicts_of_latent_alignment(self, attention: ScoredAttention) -> Iterator[str]:
        kind, decoder = attention.alignment.kind, self.decoder
        if kind == "posterior" and not decoder.input_feeding and not attention.reads_past:
            yield (
                "attention.alignment.kind=posterior changes what later steps read, but here they read nothing of it; "
                "set decoder.input_feeding=true, or use attention/normalizer=first_order or "
                "attention/alignment=marginal"
            )
        if attention.dropout and decoder.attend == "after" and not decoder.input_feeding:
            yield (
                f"attention.dropout={attention.dropout} drops weights of the mean context, but with "
                f"attention.alignment.kind={kind}, decoder.attend=after and decoder.input_feeding=false nothing reads "
                "it; set it to 0, or use decoder.dropout"
            )
        if decoder.copy:
            yield (
                f"decoder.copy=true mixes one prediction with copies, but attention.alignment.kind={kind} has a "
                "prediction for each source position; set decoder.copy=false, or use attention/alignment=expected"
            )
