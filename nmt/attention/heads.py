"""Multi-head attention: any attention, applied to several projections of query, key and value.

Shapes: B batch, S source positions, T target positions, Q query, M memory, N heads, d size of a head.
"""

import math

import torch
from torch import Tensor, nn

from nmt.attention.attention import Attention
from nmt.attention.memory import Attended, Choice, Memory, Past
from nmt.ops.linear import Linear


class MultiHeadAttention(nn.Module):
    """W_o [head_1; ...; head_N], head_n = attention(W_q^n q, W_k^n h, W_v^n h)   (Vaswani et al. 2017, 3.2.2).

    The heads share the inner attention's parameters and differ in their projections. One head is general
    query-key-value attention.
    """

    def __init__(self, inner: Attention, query_dim: int, memory_dim: int, dim: int, heads: int) -> None:
        """`inner` attends with queries and states of size d = dim / heads."""
        super().__init__()
        assert dim % heads == 0
        self.inner, self.heads = inner, heads
        self.query_proj = Linear(query_dim, dim, bias=False)
        self.key_proj = Linear(memory_dim, dim, bias=False)
        self.value_proj = Linear(memory_dim, dim, bias=False)
        self.output_proj = Linear(dim, memory_dim, bias=False)

    @property
    def reads_past(self) -> bool:
        """Does a step depend on what earlier steps attended to?"""
        return self.inner.reads_past

    def remember(self, states: Tensor, valid: Tensor, *, nonempty: bool = False) -> Memory:
        """(B, S, M), bool (B, S) -> Memory with values, keys and valid (B N, S, ...); see `Attention.remember`."""
        valid = valid[:, None].expand(-1, self.heads, -1).flatten(0, 1)
        keys, values = (self._fold(projection(states)) for projection in (self.key_proj, self.value_proj))
        return self.inner.remember(keys, valid, values, nonempty=nonempty)._replace(heads=self.heads)

    def start(self, valid: Tensor) -> Past:
        """bool (B, S) -> the past before the first step."""
        return Past.start(valid[:, None].expand(-1, self.heads, -1))

    def sequence(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Queries (B, T, Q) of T successive steps -> Attended; the weights are the heads' mean."""
        return self._joined(self.inner.sequence(*self._by_head(query, past, memory)), query)

    def step(self, query: Tensor, memory: Memory, past: Past) -> Attended:
        """Queries (B, K, Q) of K hypotheses of each sentence, all at one step -> Attended, with K for T."""
        return self._joined(self.inner.step(*self._by_head(query, past, memory)), query)

    def _by_head(self, query: Tensor, past: Past, memory: Memory) -> tuple[Tensor, Memory, Past]:
        return self._fold(self.query_proj(query)), memory, past.map(lambda tensor: tensor.flatten(0, 1))

    def _joined(self, attended: Attended, query: Tensor) -> Attended:
        unfold = self._unfold
        context = unfold(attended.context).transpose(1, 2).flatten(2)
        log_weights, choice = attended.log_weights, attended.choice
        if log_weights is not None:
            log_weights = _log_mean(unfold(log_weights))
        if choice is not None:
            choice = Choice(unfold(choice.log_prob).sum(1), unfold(choice.entropy).sum(1), query)
        weights, past = unfold(attended.weights).mean(1), attended.past.map(unfold)
        detail = None if attended.detail is None else attended.detail.by_head(self.heads)
        return Attended(self.output_proj(context), weights, past, log_weights, choice=choice, detail=detail)

    def _fold(self, projected: Tensor) -> Tensor:
        """(B, L, N * d) -> (B * N, L, d)."""
        return torch.stack(projected.chunk(self.heads, dim=-1), dim=1).flatten(0, 1)

    def _unfold(self, folded: Tensor) -> Tensor:
        """(B * N, ...) -> (B, N, ...)."""
        return folded.view(-1, self.heads, *folded.shape[1:])


def _log_mean(log_weights: Tensor) -> Tensor:
    """(B, N, T, S) -> log of the heads' mean weight (B, T, S); -inf, without a gradient, where all heads have -inf."""
    nowhere = (log_weights == -torch.inf).all(1)
    mean = log_weights.masked_fill(nowhere[:, None], 0.0).logsumexp(1) - math.log(log_weights.shape[1])
    return mean.masked_fill(nowhere, -torch.inf)
