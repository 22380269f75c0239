"""Builds an attention from its section of the configuration."""

import torch

from nmt.attention.alignment import (
    Alignment,
    ExpectedAlignment,
    LatentAlignment,
    Policy,
    SampledAlignment,
    StraightThroughAlignment,
)
from nmt.attention.attention import (
    Attention,
    GlobalWindow,
    LocalMonotonicWindow,
    LocalPredictiveWindow,
    MultiHeadAttention,
    Window,
)
from nmt.attention.normalizers import (
    Chunk,
    EntmaxNormalizer,
    FertilityNormalizer,
    FirstOrderNormalizer,
    LinearChainNormalizer,
    MonotonicNormalizer,
    Normalizer,
    SoftmaxNormalizer,
    SparsemaxNormalizer,
)
from nmt.attention.scores import (
    AdditiveScore,
    ConcatScore,
    CosineScore,
    Coverage,
    DotScore,
    GaussianMixtureScore,
    GeneralScore,
    LinearCoverage,
    LocationAwareScore,
    LocationScore,
    NormedAdditiveScore,
    ScaledDotScore,
    Score,
)
from nmt.config.schema import model as schema


def build_attention(
    config: schema.ScoredAttention | schema.EncoderSelfAttention, query_dim: int, memory_dim: int
) -> Attention | MultiHeadAttention:
    """Build an attention of queries (B, T, query_dim) over states (B, S, memory_dim); contexts are
    (B, T, memory_dim)."""
    projection = config.projection
    if isinstance(projection, schema.NoHeads):
        return _attention(config, query_dim, memory_dim)
    size = projection.dim // projection.heads
    inner = _attention(config, size, size)
    return MultiHeadAttention(inner, query_dim, memory_dim, projection.dim, projection.heads)


def build_policy(config: schema.Attention, query_dim: int) -> Policy | None:
    """Build the policy that trains sampled positions; None for any other alignment."""
    if not isinstance(config, schema.ScoredAttention) or not isinstance(config.alignment, schema.Sampled):
        return None
    sampled = config.alignment
    return Policy(query_dim, sampled.baseline, discount=sampled.discount, entropy_weight=sampled.entropy_weight)


def _attention(
    config: schema.ScoredAttention | schema.EncoderSelfAttention, query_dim: int, memory_dim: int
) -> Attention:
    score = _score(config.score, query_dim, memory_dim)
    window, normalizer = _window(config.window, query_dim), _normalizer(config.normalizer)
    if isinstance(config, schema.EncoderSelfAttention):
        return Attention(score, window, normalizer, dropout=config.dropout)
    coverage: Coverage | None = None
    if config.coverage.kind == "linear":
        with torch.no_grad():
            keys = score.keys(torch.zeros(1, 1, memory_dim))
        coverage = LinearCoverage(keys.shape[-1])
    chunk = None
    if config.normalizer.kind == "mocha":
        chunk = Chunk(_score(config.score, query_dim, memory_dim), config.normalizer.chunk)
    return Attention(score, window, normalizer, _alignment(config.alignment), coverage, config.dropout, chunk)


def _score(config: schema.Score, query_dim: int, memory_dim: int) -> Score:  # noqa: C901, PLR0911
    match config:
        case schema.DotScore():
            return DotScore()
        case schema.ScaledDotScore():
            return ScaledDotScore()
        case schema.GeneralScore():
            return GeneralScore(query_dim, memory_dim)
        case schema.AdditiveScore():
            return AdditiveScore(query_dim, memory_dim, config.dim)
        case schema.NormedAdditiveScore():
            return NormedAdditiveScore(query_dim, memory_dim, config.dim)
        case schema.ConcatScore():
            return ConcatScore(query_dim, memory_dim, config.dim, config.layers)
        case schema.CosineScore():
            return CosineScore(query_dim, memory_dim, config.initial_strength)
        case schema.LocationScore():
            return LocationScore(query_dim, config.max_positions)
        case schema.LocationAwareScore():
            return LocationAwareScore(query_dim, memory_dim, config.dim, config.filters, config.width)
        case schema.GaussianMixtureScore():
            return GaussianMixtureScore(query_dim, config.components)


def _window(config: schema.Window, query_dim: int) -> Window:
    match config:
        case schema.GlobalWindow():
            return GlobalWindow()
        case schema.LocalMonotonicWindow():
            return LocalMonotonicWindow(config.reach)
        case schema.LocalPredictiveWindow():
            return LocalPredictiveWindow(config.reach, query_dim, config.dim)


def _normalizer(config: schema.Normalizer) -> Normalizer:  # noqa: PLR0911
    match config:
        case schema.Softmax():
            return SoftmaxNormalizer(config.temperature)
        case schema.Sparsemax():
            return SparsemaxNormalizer()
        case schema.Entmax15():
            return EntmaxNormalizer()
        case schema.FirstOrder():
            return FirstOrderNormalizer(config.reach, config.monotonic)
        case schema.Monotonic() | schema.Mocha():
            return MonotonicNormalizer(config.noise, config.initial_offset)
        case schema.LinearChain():
            return LinearChainNormalizer()
        case schema.Fertility():
            return FertilityNormalizer(config.fertility)


def _alignment(config: schema.Alignment) -> Alignment:
    match config:
        case schema.Expected():
            return ExpectedAlignment()
        case schema.Sampled():
            return SampledAlignment(config.soft_share)
        case schema.StraightThrough():
            return StraightThroughAlignment(config.temperature)
        case schema.Marginal() | schema.Variational() | schema.Posterior():
            return LatentAlignment()
