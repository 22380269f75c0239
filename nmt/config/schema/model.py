"""Sections for the network: attention and its components, embeddings, encoder and decoder.

`conflicts` list the combinations of values that make no sense. Their conditions use class attributes of the sections,
such as `reads_keys` of a score, which state properties of the module that a section configures.
"""

import math
import warnings
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError, PydanticKnownError

from nmt.config.schema.base import (
    BY_KIND,
    Conflict,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Probability,
    Section,
)
from nmt.config.schema.data import VocabularySize

Units = Annotated[int, Field(gt=0, le=2**14)]  # width of a layer; 16384 units need gigabytes of recurrent weights
Layers = Annotated[int, Field(gt=0, le=100)]
Positions = Annotated[int, Field(gt=0, le=100_000)]  # number of source positions
Temperature = Annotated[float, Field(ge=1e-4, le=1e4)]  # energies divided by a smaller temperature overflow


class AnyScore(Section):
    """Common properties of the scores, which compute the energy of each source position."""

    reads_past: ClassVar[bool] = False  # do the energies depend on the attention of earlier steps?
    reads_keys: ClassVar[bool] = True  # do the energies depend on the keys?
    linear_in_keys: ClassVar[bool] = True  # has the score a term W k of the keys k, to which coverage can add?
    needs_equal_sizes: ClassVar[bool] = False  # must query and key have the same width?


class DotScore(AnyScore):
    kind: Literal["dot"]
    needs_equal_sizes = True


class ScaledDotScore(AnyScore):
    kind: Literal["scaled_dot"]
    needs_equal_sizes = True


class GeneralScore(AnyScore):
    kind: Literal["general"]


class AdditiveScore(AnyScore):
    kind: Literal["additive"]
    dim: Units


class NormedAdditiveScore(AnyScore):
    kind: Literal["normed_additive"]
    dim: Units


class ConcatScore(AnyScore):
    kind: Literal["concat"]
    dim: Units
    layers: Layers


class CosineScore(AnyScore):
    kind: Literal["cosine"]
    initial_strength: Positive
    linear_in_keys = False


class LocationScore(AnyScore):
    kind: Literal["location"]
    max_positions: Positions
    reads_keys = linear_in_keys = False


class LocationAwareScore(AnyScore):
    kind: Literal["location_aware"]
    dim: Units
    filters: Units
    width: Units
    reads_past = True
    conflicts = Conflict.each(
        "width needs to be odd, to be centred on a position; try width={self.odd_width}",
        when=lambda score: score.width != score.odd_width,
    )

    @property
    def odd_width(self) -> int:
        """The width, or the next odd number."""
        return self.width | 1


class GaussianMixtureScore(AnyScore):
    kind: Literal["gaussian_mixture"]
    components: Units
    reads_past = True
    reads_keys = linear_in_keys = False


KeyScore = DotScore | ScaledDotScore | GeneralScore | AdditiveScore | NormedAdditiveScore | ConcatScore | CosineScore
StatelessScore = KeyScore | LocationScore
Score = Annotated[StatelessScore | LocationAwareScore | GaussianMixtureScore, BY_KIND]


class GlobalWindow(Section):
    kind: Literal["global"]


class LocalMonotonicWindow(Section):
    kind: Literal["local_m"]
    reach: Positions


class LocalPredictiveWindow(Section):
    kind: Literal["local_p"]
    reach: Positions
    dim: Units


Window = Annotated[GlobalWindow | LocalMonotonicWindow | LocalPredictiveWindow, BY_KIND]


class AnyNormalizer(Section):
    """Common properties of the normalizers, which turn energies into weights over source positions."""

    reads_past: ClassVar[bool] = False  # do the weights depend on the weights of earlier steps?
    takes_window: ClassVar[bool] = True  # can a window remove positions before the normalizer sees them?
    always_sums_to_one: ClassVar[bool] = True  # False if the weights of a step may sum to less than 1
    gives_log_probs: ClassVar[bool] = False  # does it return logarithms of weights that always sum to 1?
    gives_log_weights: ClassVar[bool] = False  # does it return logarithms of its weights, whatever their sum?


class Softmax(AnyNormalizer):
    kind: Literal["softmax"]
    temperature: Temperature
    gives_log_probs = gives_log_weights = True


class Sparsemax(AnyNormalizer):
    kind: Literal["sparsemax"]


class Entmax15(AnyNormalizer):
    kind: Literal["entmax15"]


class FirstOrder(AnyNormalizer):
    kind: Literal["first_order"]
    reach: Positions
    monotonic: bool
    reads_past = True
    takes_window = False


class HardMonotonic(AnyNormalizer):
    """Common values of the normalizers that only move forward through the source.

    They may reach its end without stopping at a position; then the weights sum to less than 1.
    """

    noise: NonNegative
    initial_offset: Annotated[float, Field(ge=-1e6, le=1e6)]
    outside_training: Literal["stop", "expected"]
    reads_past = gives_log_weights = True
    takes_window = always_sums_to_one = False


class Monotonic(HardMonotonic):
    kind: Literal["monotonic"]


class Mocha(HardMonotonic):
    kind: Literal["mocha"]
    # At least 2: a softmax over a chunk of one position is constant, so its energies would have no gradient.
    chunk: Annotated[int, Field(ge=2, le=100_000)]


class LinearChain(AnyNormalizer):
    kind: Literal["linear_chain"]
    gives_log_probs = gives_log_weights = True


class Fertility(AnyNormalizer):
    kind: Literal["fertility"]
    fertility: Positive
    reads_past = True
    takes_window = False


SoftNormalizer = Softmax | Sparsemax | Entmax15 | LinearChain
Normalizer = Annotated[SoftNormalizer | FirstOrder | Fertility | Monotonic | Mocha, BY_KIND]


class AnyAlignment(Section):
    """Common properties of the alignments, which say how the decoder uses a distribution over source positions."""

    selects_one: ClassVar[bool] = False  # is the context the state of a single position?
    differentiable: ClassVar[bool] = True  # does the gradient pass through the weights?
    latent: ClassVar[bool] = False  # is the prediction a weighted sum of one prediction per position?


class Expected(AnyAlignment):
    kind: Literal["expected"]


class Sampled(AnyAlignment):
    kind: Literal["sampled"]
    soft_share: Probability
    baseline: Literal["moving", "learned"]
    discount: Fraction
    weight: Positive
    entropy_weight: NonNegative
    selects_one = True
    differentiable = False


class StraightThrough(AnyAlignment):
    kind: Literal["straight_through"]
    temperature: Temperature
    selects_one = True


class Latent(AnyAlignment):
    """Common values of the alignments whose prediction is a weighted sum of one prediction per source position."""

    top_k: Positions | None
    min_share: Annotated[float, Field(ge=0.0, lt=1.0)]
    latent = True


class Marginal(Latent):
    kind: Literal["marginal"]


class Variational(Latent):
    kind: Literal["variational"]
    estimator: Literal["enumerate", "sample"]
    dim: Units
    kl_weight: NonNegative


class Posterior(Latent):
    kind: Literal["posterior"]
    prior_share: Fraction


Alignment = Annotated[Expected | Sampled | StraightThrough | Marginal | Variational | Posterior, BY_KIND]


class NoCoverage(Section):
    kind: Literal["none"]


class LinearCoverage(Section):
    kind: Literal["linear"]
    loss_weight: NonNegative
    loss_start: CountOrZero


Coverage = Annotated[NoCoverage | LinearCoverage, BY_KIND]


class NoHeads(Section):
    kind: Literal["none"]


class Heads(Section):
    kind: Literal["heads"]
    heads: Units
    dim: Units
    conflicts = Conflict.each(
        "dim needs to be divisible by the number of heads, but heads; try dim={self.divisible_dim}",
        when=lambda projection: projection.dim != projection.divisible_dim,
    )

    @property
    def divisible_dim(self) -> int:
        """The least multiple of the number of heads from `dim` on."""
        return self.heads * math.ceil(self.dim / self.heads)


Projection = Annotated[NoHeads | Heads, BY_KIND]
UNUSED_PROJECTION = (
    "projection.kind=heads needs a score that reads the keys, but score.reads_keys=false; "
    "use projection=none, or another score such as scaled_dot"
)


class ScoredAttention(Section):
    kind: Literal["attention"]
    score: Score
    window: Window
    normalizer: Normalizer
    alignment: Alignment
    coverage: Coverage
    projection: Projection
    dropout: Probability
    conflicts = Conflict.each(
        "normalizer.takes_window=false needs positions that a window may leave out, but window.kind=local_m|local_p; "
        "use attention/window=global, or attention/normalizer=softmax",
        "score.kind=gaussian_mixture needs weights that always sum to 1, but normalizer.always_sums_to_one=false; "
        "use attention/normalizer=softmax, or attention/score=normed_additive",
        UNUSED_PROJECTION,
        "coverage.kind=linear needs a score with a linear term in the keys, to which it adds, "
        "but score.linear_in_keys=false; use attention/score=additive, or attention/coverage=none",
        "alignment.kind!=expected needs a distribution over positions, but normalizer.always_sums_to_one=false; "
        "use attention/alignment=expected, or attention/normalizer=first_order_monotonic",
        "dropout>0 needs several positions, of which it drops some, but alignment.selects_one=true; "
        "set attention.dropout=0, or use attention/alignment=expected",
        "coverage.loss_weight>0 needs a gradient through the weights, but alignment.differentiable=false; "
        "set attention.coverage.loss_weight=0, or use attention/alignment=straight_through",
        "alignment.latent=true needs a single head, over whose positions it sums, but projection.kind=heads; "
        "use attention/projection=none, or attention/alignment=sampled",
        "coverage.loss_weight>0 needs a coverage of distributions, not of posteriors, but alignment.kind=posterior; "
        "set attention.coverage.loss_weight=0, or use attention/alignment=marginal",
        "alignment.kind=variational needs the logarithms of the distribution, but normalizer.gives_log_probs=false; "
        "use attention/normalizer=softmax or linear_chain, or attention/alignment=marginal",
    )

    @property
    def reads_past(self) -> bool:
        """Does the attention of a step depend on the weights of earlier steps?"""
        return self.score.reads_past or self.coverage.kind != "none" or self.normalizer.reads_past

    @property
    def reads_past_weights(self) -> bool:
        """Does it depend on those weights of earlier steps that a posterior replaces? A Gaussian mixture reads earlier
        means, monotonic reading earlier stops."""
        reads_weights = self.score.kind == "location_aware" or self.normalizer.kind in {"fertility", "first_order"}
        return reads_weights or self.coverage.kind != "none"

    @property
    def needs_equal_sizes(self) -> bool:
        """Must the decoder's states, the queries, be as wide as the encoder's states, the keys?"""
        return self.score.needs_equal_sizes and self.projection.kind == "none"


class NoAttention(Section):
    kind: Literal["none"]
    context: Literal["first_state", "every_step"]


Attention = Annotated[ScoredAttention | NoAttention, BY_KIND]


class NoSelfAttention(Section):
    kind: Literal["none"]


class EncoderSelfAttention(Section):
    kind: Literal["attention"]
    layers: Layers
    score: Annotated[StatelessScore, BY_KIND]
    window: Window
    normalizer: Annotated[SoftNormalizer, BY_KIND]
    projection: Projection
    dropout: Probability
    conflicts = Conflict.each(UNUSED_PROJECTION)


SelfAttention = Annotated[NoSelfAttention | EncoderSelfAttention, BY_KIND]


# For a wrong value of a union, pydantic reports one error per type. These validators run before it and report only one.
def _refuse_unless_layer(value: object) -> object:
    if isinstance(value, bool) or (type(value) is int and 2 <= value <= 100):  # noqa: PLR2004
        return value
    raise PydanticCustomError("first_layer", "Input should be true, false or the number of a layer from 2 to 100")


def _refuse_unless_directions(value: object) -> object:
    if isinstance(value, bool) or value == "first":
        return value
    raise PydanticKnownError("literal_error", {"expected": "true, false or 'first'"})


# The lowest layer, counted from 1, with a residual connection. true is layer 2, false no layer.
FirstLayer = Annotated[bool | Annotated[int, Field(ge=2, le=100)], BeforeValidator(_refuse_unless_layer)]
# Whether all layers read in both directions (true), none (false), or only the first layer ("first").
Bidirectional = Annotated[bool | Literal["first"], BeforeValidator(_refuse_unless_directions)]
Cell = Literal["rnn", "gru", "lstm"]
# The field Decoder.copy hides the deprecated method `copy` of pydantic's models.
warnings.filterwarnings("ignore", message='Field name "copy" in "Decoder" shadows an attribute')


class Size(Section):
    """Defaults of the tokenizer and the optimizer for the model size that size= chooses."""

    vocab_size: VocabularySize
    lr: Positive


class SizeThresholds(Section):
    """For each size, the least number of training pairs for which size=auto chooses it."""

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
    """Common values of encoder and decoder, which are both recurrent networks."""

    cell: Cell
    hidden: Units
    layers: Layers
    dropout: Probability
    residual: FirstLayer
    conflicts: ClassVar[tuple[Conflict, ...]] = Conflict.each(
        "residual needs a layer that adds its output to its input, but layers; "
        "set layers={self.first_residual} or more, or residual=false",
        when=lambda network: network.first_residual > network.layers,
    )

    @property
    def first_residual(self) -> int:
        """The lowest layer, counted from 1, with a residual connection; 0 if no layer has one."""
        return 2 * self.residual if isinstance(self.residual, bool) else self.residual


class Encoder(Network):
    bidirectional: Bidirectional
    self_attention: SelfAttention
    conflicts = (
        *Network.conflicts,
        *Conflict.each(
            "bidirectional=first needs layers in one direction above the first, but layers=1; "
            "set layers=2 or more, or bidirectional=true",
            "residual=true|2 needs layers of equal width, but the second layer's input has twice the width, "
            "but bidirectional=first; set residual=3 or more, or bidirectional=true",
        ),
    )

    @property
    def directions(self) -> int:
        """The number of directions in which the top layer reads: 1 or 2."""
        return 2 if self.bidirectional is True else 1

    @property
    def output_dim(self) -> int:
        """The width M of the encoder's states, in which the directions of the top layer are concatenated."""
        return self.hidden * self.directions


class Decoder(Network):
    attend: Literal["before", "between", "after", "first_layer"]
    input_feeding: bool
    readout: Literal["attentional", "deep", "maxout"]
    readout_dim: Units
    lexical: bool
    copy: bool  # type: ignore[assignment]
    fixnorm: bool
    bridge: Literal["final", "mean"]
    conflicts = (
        *Network.conflicts,
        *Conflict.each(
            "attend=first_layer needs layers above the first to feed the context into, but layers=1; "
            "set layers=2 or more, or attend=after",
            "input_feeding=true needs a first layer that reads more than the previous word, but attend=first_layer; "
            "set input_feeding=false, or attend=after",
        ),
    )


class Model(Section):
    """All sections of the network."""

    embedding: Embedding
    encoder: Encoder
    decoder: Decoder
    attention: Attention
    conflicts = (
        *Conflict.each(
            "decoder.attend=before|between|first_layer needs an attention, but attention.kind=none; set it to after",
            "encoder.self_attention.kind=attention needs a decoder that reads the encoder's states, "
            "but attention.kind=none and decoder.bridge=final; set decoder.bridge=mean",
        ),
        Conflict(
            "attention.score.kind needs states of decoder and encoder of equal size, "
            "but decoder.hidden and encoder.hidden and encoder.bidirectional; set "
            "decoder.hidden={self.encoder.output_dim}, or use attention/score=general or attention/projection=heads",
            lambda model: model.attention.needs_equal_sizes and model.decoder.hidden != model.encoder.output_dim,
        ),
        *(
            Conflict(
                f"{key}=true needs a readout of the embeddings' size, but decoder.readout_dim and embedding.dim; "
                f"set them equal, or {key}=false",
                lambda model: model.decoder.readout_dim != model.embedding.dim,
            )
            for key in ("embedding.tie_output", "decoder.lexical")
        ),
        Conflict(
            "attention.alignment.kind=posterior needs later steps that read what it changes, "
            "but decoder.input_feeding=false; set decoder.input_feeding=true, "
            "or use attention/normalizer=first_order or attention/alignment=marginal",
            lambda model: not model.attention.reads_past_weights,
        ),
        *Conflict.each(
            "decoder.copy=true needs an attention, but attention.kind=none; set it to false, or choose an attention",
            "decoder.lexical=true needs an attention, but attention.kind=none; set it to false, or choose an attention",
            "attention.dropout>0 needs a decoder that reads the mean context, but attention.alignment.latent=true "
            "and decoder.attend=after and decoder.input_feeding=false; set it to 0, or use decoder.dropout",
            "decoder.copy=true needs one prediction to mix with copies, not one for each source position, "
            "but attention.alignment.latent=true; set decoder.copy=false, or use attention/alignment=expected",
        ),
    )
