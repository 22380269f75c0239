"""From the attention section of a configuration to modules."""

from torch import nn

from nmt.attention.attention import Attention
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import AdditiveScore, DotScore, GeneralScore
from nmt.attention.windows import GlobalWindow
from nmt.config import schema


def build_attention(config: schema.SoftAttention, query_dim: int, memory_dim: int) -> Attention:
    """An attention of queries (B, T, query_dim) over states (B, S, memory_dim)."""
    normalizer = SoftmaxNormalizer(config.normalizer.temperature)
    return Attention(_score(config.score, query_dim, memory_dim), GlobalWindow(), normalizer)


def _score(config: schema.Score, query_dim: int, memory_dim: int) -> nn.Module:
    match config:
        case schema.DotScore():
            return DotScore()
        case schema.GeneralScore():
            return GeneralScore(query_dim, memory_dim)
        case schema.AdditiveScore():
            return AdditiveScore(query_dim, memory_dim, config.dim)
