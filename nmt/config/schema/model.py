"""Embeddings, encoder, decoder, attention."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from nmt.config.schema.base import Probability, Section

Cell = Literal["rnn", "gru", "lstm"]


class Embedding(Section):
    dim: PositiveInt
    dropout: Probability
    tie_source_target: bool
    tie_output: bool


class Encoder(Section):
    cell: Cell
    hidden: PositiveInt
    layers: PositiveInt
    bidirectional: bool
    dropout: Probability

    @property
    def output_dim(self) -> int:
        """M: the size of one encoder state, both directions side by side."""
        return self.hidden * (2 if self.bidirectional else 1)


class Decoder(Section):
    cell: Cell
    hidden: PositiveInt
    layers: PositiveInt
    dropout: Probability
    attend: Literal["before", "after"]
    input_feeding: bool
    readout: Literal["attentional", "deep", "maxout"]
    readout_dim: PositiveInt
    bridge: Literal["final", "mean"]


class DotScore(Section):
    kind: Literal["dot"]


class GeneralScore(Section):
    kind: Literal["general"]


class AdditiveScore(Section):
    kind: Literal["additive"]
    dim: PositiveInt


Score = Annotated[DotScore | GeneralScore | AdditiveScore, Field(discriminator="kind")]


class GlobalWindow(Section):
    kind: Literal["global"]


class Softmax(Section):
    kind: Literal["softmax"]
    temperature: PositiveFloat


class SoftAttention(Section):
    kind: Literal["attention"]
    score: Score
    window: GlobalWindow
    normalizer: Softmax


class NoAttention(Section):
    kind: Literal["none"]
    context: Literal["first_state", "every_step"]


Attention = Annotated[SoftAttention | NoAttention, Field(discriminator="kind")]


class Model(Section):
    """All that shapes the network."""

    embedding: Embedding
    encoder: Encoder
    decoder: Decoder
    attention: Attention

    @validator(mode="after")
    def _sizes_fit(self) -> Self:
        memory, query = self.encoder.output_dim, self.decoder.hidden
        if self.attention.kind == "attention" and self.attention.score.kind == "dot" and memory != query:
            directions = 2 if self.encoder.bidirectional else 1
            raise ValueError(
                f"attention.score.kind=dot compares vectors of equal size, but decoder.hidden={query} and "
                f"encoder.hidden={self.encoder.hidden} x {directions} directions = {memory}; "
                f"set decoder.hidden={memory}, or use attention=luong_general"
            )
        if self.embedding.tie_output and self.decoder.readout_dim != self.embedding.dim:
            raise ValueError(
                f"embedding.tie_output=true needs decoder.readout_dim={self.decoder.readout_dim} to equal "
                f"embedding.dim={self.embedding.dim}; set them equal, or embedding.tie_output=false"
            )
        return self
