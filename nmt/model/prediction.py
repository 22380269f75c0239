"""From decoder state and context to the distribution of the next token: readout, output layer, prediction.

A decoder predicts one readout of each step, a mixture of several, or a readout with tokens copied from the source.

Shapes: C passes over a batch, B sentences, T target positions (or hypotheses of a sentence), S source positions,
H hidden, M memory, E embedding, K readouts of a position, R readout, P what its activation gets, V vocabulary, L its
part that a search may use.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nmt.ops.layers import Linear, linear, map_tensors, matmul, wide
from nmt.ops.output_loss import (
    Criterion,
    OutputLoss,
    SeveralRows,
    copied_log_probs,
    mean_over_mixture,
    mixture_log_probs,
    of_mixture,
    output_loss,
    target_log_probs,
    with_copies,
)

MIN_NORM = 0.01  # a shorter row of the output table is not normalised to length 1
NEVER = -1  # in place of a source token that is not copied


class Readout(nn.Module):
    """attentional: tanh(W [s; c]) (Luong et al. 2015, eq. 5); deep: tanh(W [s; c; y]) (Pascanu et al. 2014);
    maxout: max over pairs of W [s; c; y] (Goodfellow et al. 2013; Bahdanau et al. 2015, A.2.2).

    context_dim = 0: no context.
    """

    def __init__(
        self,
        kind: Literal["attentional", "deep", "maxout"],
        state_dim: int,
        context_dim: int,
        word_dim: int,
        readout_dim: int,
    ) -> None:
        super().__init__()
        self.kind, self.dim = kind, readout_dim
        word_dim = 0 if kind == "attentional" else word_dim
        width = readout_dim * (2 if kind == "maxout" else 1)
        self.sizes = (state_dim, context_dim, word_dim)  # of the inputs
        self.proj = Linear(sum(self.sizes), width)

    def forward(self, state: Tensor, context: Tensor | None, word: Tensor) -> Tensor:
        """(..., H), (..., M) or None, (..., E) -> (..., R)."""
        parts = [state]
        if context is not None:
            parts.append(context)
        if self.kind != "attentional":
            parts.append(word)
        projected: Tensor = self.proj(torch.cat(parts, dim=-1))
        return self.activation(projected)

    def parts(self) -> tuple[Tensor, Tensor]:
        """W without the context's columns (P, H + E), and these alone (P, M)."""
        of_state, of_context, of_word = torch.split(self.proj.weight, list(self.sizes), dim=1)
        return torch.cat([of_state, of_word], dim=1), of_context.contiguous()

    def activation(self, projected: Tensor) -> Tensor:
        """W [...] (..., P = R or 2 R) -> (..., R)."""
        if self.kind == "maxout":
            return projected.reshape(*projected.shape[:-1], -1, 2).amax(-1)
        return torch.tanh(projected)


class LexicalModel(nn.Module):
    """tanh(W f + b) + f with f = tanh(sum over s of a_s e_s), where e_s are the source tokens' embeddings and a_s their
    attention weights (Nguyen and Chiang 2018, 4): rare words are translated as themselves, not as their neighbours.

    The result is added to the readout. The paper gives it an output layer of its own; here both share one.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = Linear(dim, dim)

    def forward(self, weights: Tensor, words: Tensor) -> Tensor:
        """(B, T, S), (B, S, E) -> (B, T, E)."""
        return self.of_attended(torch.bmm(weights.to(words.dtype), words))

    def of_attended(self, words: Tensor) -> Tensor:
        """sum over s of a_s e_s, or a single e_s: (..., E) -> (..., E)."""
        attended = torch.tanh(words)
        projected: Tensor = self.proj(attended)
        return torch.tanh(projected) + attended


class OutputLayer(NamedTuple):
    """The output layer's parameters, ready for products with any number of readouts."""

    weight: Tensor  # (V, R), one row for each token; in search it may be packed
    bias: Tensor  # (V,)
    scale: Tensor | None  # () of fixnorm

    def operands(self, readouts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., R) -> readouts, weight and bias, of which `linear` makes logits."""
        scaled = readouts if self.scale is None else self.scale * normalize(readouts, dim=-1)
        return scaled, self.weight, self.bias

    def logits(self, readouts: Tensor) -> Tensor:
        """(..., R) -> (..., V)."""
        return linear(*self.operands(readouts))


class Output(Linear):
    """The output layer: W r + b, or with fixnorm g cos(w_v, r) + b_v, so that frequent words gain nothing by long
    vectors (Nguyen and Chiang 2018, 3; g is learned and starts at sqrt(R), as in Nguyen and Salazar 2019)."""

    def __init__(self, readout_dim: int, vocabulary: int, fixnorm: bool = False) -> None:
        super().__init__(readout_dim, vocabulary)
        self.scale = nn.Parameter(torch.tensor(readout_dim**0.5)) if fixnorm else None

    def forward(self, readouts: Tensor) -> Tensor:
        """(..., R) -> logits (..., V)."""
        return self.layer().logits(readouts)

    def layer(self) -> OutputLayer:
        """Prepare the parameters for products. (A tied table starts with zeros for padding: `eps` bounds its
        gradient.)"""
        weight = self.weight if self.scale is None else normalize(self.weight, dim=-1, eps=MIN_NORM)
        return OutputLayer(weight, self.bias, self.scale)


class Components(NamedTuple):
    """What the distribution of each of n target positions is mixed from, by position."""

    readouts: Tensor  # (n, K, R)
    shares: Tensor  # (n, K + S) of the readouts' distributions and of the copied tokens; S = 0 without copies
    tokens: Tensor  # int64 (n, S)

    def probabilities(self, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        """Output layer (V, R), (V,) -> (n, V)."""
        probs, shares = matmul(self.readouts, weight, bias).softmax(-1, dtype=dtype), self.shares
        if self.tokens.shape[1]:
            shares = shares.to(dtype)
            return (probs[:, 0] * shares[:, :1]).scatter_add_(-1, self.tokens, shares[:, 1:])
        if probs.shape[1] == 1:
            return probs[:, 0]
        with torch.autocast(probs.device.type, enabled=False):
            return torch.bmm(shares[:, None].to(dtype), probs)[:, 0]


class Prediction(ABC):
    """The distributions of the next token at T steps of B sentences, before the output layer."""

    readouts: Tensor  # (B, T, R), or (B, T, K, R)

    def loss(
        self, output: OutputLayer, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
    ) -> OutputLoss:
        """Targets int64 (B, T) of a prediction (C * B, T) in C passes, any number of (B * T, ...) -> the criterion's
        total over all target tokens and its terms (B, T), 0 on padding. The criterion gets targets and
        `by_position`."""
        counted = (targets != pad).flatten()
        total, terms = self._loss(output, targets, counted, criterion, (targets.flatten(), *by_position))
        return OutputLoss(total, {name: term.view(targets.shape) for name, term in terms.items()})

    @abstractmethod
    def _loss(
        self, output: OutputLayer, targets: Tensor, counted: Tensor, criterion: Criterion, others: tuple[Tensor, ...]
    ) -> OutputLoss: ...

    @abstractmethod
    def logits(self, output: OutputLayer) -> Tensor:
        """Compute logits (B, T, V), which are log-probabilities where distributions are mixed."""

    def log_probs(self, output: OutputLayer) -> Tensor:
        """Compute log-probabilities (B, T, V)."""
        return self.logits(output)

    @abstractmethod
    def at(self, rows: Tensor, steps: Tensor) -> "Prediction":
        """Take one step of each of N sentences, int64 (N,) both -> (N, 1, ...)."""

    @abstractmethod
    def components(self) -> Components:
        """Return what each of the B * T distributions is mixed from."""

    def posterior_weights(self, weights: Tensor | None, output: OutputLayer, target: Tensor) -> Tensor | None:
        """Attention weights (B, T, S) -> those given also the tokens y_1 ... y_T, int64 (B, T), of which only a mixture
        knows more than the weights."""
        return weights


@dataclass(frozen=True)
class Readouts(Prediction):
    """One readout of each step; also without T."""

    readouts: Tensor  # (B, T, R)

    def _loss(
        self, output: OutputLayer, targets: Tensor, counted: Tensor, criterion: Criterion, others: tuple[Tensor, ...]
    ) -> OutputLoss:
        passes = len(self.readouts) // len(targets)
        operands = output.operands(self.readouts.reshape(passes, targets.numel(), -1))
        return output_loss(*operands, counted, criterion, *others)

    def logits(self, output: OutputLayer) -> Tensor:
        return output.logits(self.readouts)

    def log_probs(self, output: OutputLayer) -> Tensor:
        return self.logits(output).log_softmax(-1)

    def at(self, rows: Tensor, steps: Tensor) -> "Readouts":
        return Readouts(self.readouts[rows, steps][:, None])

    def components(self) -> Components:
        rows = self.readouts.flatten(0, 1)[:, None]
        return Components(rows, rows.new_ones(len(rows), 1), rows.new_empty(len(rows), 0, dtype=torch.int64))


@dataclass(frozen=True)
class Mixture(Prediction):
    """p(y_t) = sum_s a_ts p(y_t | h_s): a readout of each source position, computed from its encoder state instead of
    the mean context, and its weight (Deng et al. 2018, 2.1; Wu et al. 2018)."""

    readouts: Tensor  # (B, T, K, R)
    weights: Tensor  # (B, T, K), a row sums to 1, or to 0 in a sentence without positions
    positions: Tensor | None  # int64 (B, T, K); None where K = S, in order
    averages_losses: bool = False  # do the weights average losses (the evidence lower bound), not probabilities?

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Readouts, weights and positions."""
        return self.readouts, self.weights, self.positions

    def _loss(
        self, output: OutputLayer, targets: Tensor, counted: Tensor, criterion: Criterion, others: tuple[Tensor, ...]
    ) -> OutputLoss:
        passes, K = len(self.weights) // len(targets), self.weights.shape[2]
        operands = output.operands(self.readouts.reshape(passes, targets.numel(), K, -1))
        mixed = mean_over_mixture(criterion) if self.averages_losses else of_mixture(criterion)
        weights = self.weights.reshape(passes, -1, K)
        return output_loss(*operands, counted, mixed, *others, shares=weights, layout=SeveralRows)

    def logits(self, output: OutputLayer) -> Tensor:
        B, T, _ = self.weights.shape
        log_probs = mixture_log_probs(*output.operands(self.readouts.flatten(0, 1)), self.weights.flatten(0, 1))
        return log_probs.view(B, T, -1)

    def at(self, rows: Tensor, steps: Tensor) -> "Mixture":
        return Mixture(*map_tensors(lambda part: part[rows, steps][:, None], self.parts))

    def before_last(self) -> "Mixture":
        """Take all steps but the last one."""
        return Mixture(*map_tensors(lambda part: part[:, :-1], self.parts))

    def components(self) -> Components:
        rows = self.readouts.flatten(0, 1)
        return Components(rows, self.weights.flatten(0, 1), rows.new_empty(len(rows), 0, dtype=torch.int64))

    def token_log_probs(self, output: OutputLayer, tokens: Tensor) -> Tensor:
        """Compute log p(y_t | h_s) of tokens, int64 of B * T elements -> (B, T, K), where there is weight."""
        operands = output.operands(self.readouts.flatten(0, 1))
        log_probs = target_log_probs(*operands, self.weights.flatten(0, 1), tokens.flatten())
        return log_probs.view_as(self.weights)

    def posterior(self, log_probs: Tensor) -> Tensor:
        """Log-probabilities (B, T, K) of a token -> p(s | token) (B, T, K) by Bayes' rule   (Shankar and Sarawagi 2019,
        eq. 3)."""
        nowhere = self.weights == 0
        joint = (self.weights.masked_fill(nowhere, 1.0).log() + log_probs).masked_fill(nowhere, torch.finfo().min)
        return joint.softmax(-1).masked_fill(nowhere, 0.0)

    def posterior_weights(self, weights: Tensor | None, output: OutputLayer, target: Tensor) -> Tensor | None:
        assert weights is not None
        return self.spread(self.posterior(self.token_log_probs(output, target)), weights.shape[-1])

    def spread(self, weights: Tensor, length: int) -> Tensor:
        """Other weights (B, T, K) of the same positions -> (B, T, S)."""
        if self.positions is None:
            return weights
        return weights.new_zeros(*weights.shape[:2], length).scatter(-1, self.positions, weights)


@dataclass(frozen=True)
class Copying(Prediction):
    """One readout of each step, and source tokens that may be copied (See et al. 2017, 2.2; Gu et al. 2016)."""

    readouts: Tensor  # (B, T, R)
    shares: Tensor  # (B, T, 1 + S) of the output layer's prediction and of each source token, a row sums to 1
    source: Tensor  # int64 (B, S) tokens; any token where the share is always 0

    def _loss(
        self, output: OutputLayer, targets: Tensor, counted: Tensor, criterion: Criterion, others: tuple[Tensor, ...]
    ) -> OutputLoss:
        B, T = targets.shape
        rows, shares = (part.reshape(-1, B * T, part.shape[-1]) for part in (self.readouts, self.shares))
        sentences = torch.arange(B, device=targets.device).repeat_interleave(T)
        mixed = with_copies(criterion, self.source[:B])  # the same in all passes
        return output_loss(*output.operands(rows), counted, mixed, sentences, *others, shares=shares)

    def logits(self, output: OutputLayer) -> Tensor:
        tokens = self.source[:, None].expand(-1, self.readouts.shape[1], -1)
        return copied_log_probs(output.logits(self.readouts), self.shares, tokens)

    def at(self, rows: Tensor, steps: Tensor) -> "Copying":
        return Copying(self.readouts[rows, steps][:, None], self.shares[rows, steps][:, None], self.source[rows])

    def components(self) -> Components:
        tokens = self.source.repeat_interleave(self.readouts.shape[1], dim=0)
        return Components(self.readouts.flatten(0, 1)[:, None], self.shares.flatten(0, 1), tokens)


class CopyGate(nn.Module):
    """p(w) = g p_vocab(w) + (1 - g) sum of a_s over the positions s with source token w   (See et al. 2017, eq. 9).

    g = sigmoid(v . r + b) of the readout r, which is made of the context, the decoder's output and, unless it is
    attentional, the previous word; eq. 8 reads these by themselves. So the gate is one more row beside the output
    layer's, and a model prepared for search, whose contexts are multiplied with its weights, needs nothing else.

    What the attention does not give to a word goes to p_vocab: the weight on </s>, which is never copied, and what a
    window or monotonic reading leaves below 1.
    """

    def __init__(self, readout_dim: int) -> None:
        super().__init__()
        self.proj = Linear(readout_dim, 1)

    def forward(self, readouts: Tensor, weights: Tensor, source: Tensor) -> Copying:
        """(B, T, R), attention (B, T, S), int64 (B, S) tokens or NEVER -> Copying."""
        logit = self.proj(readouts)
        logit, never = wide(logit), source == NEVER
        weights = weights.to(logit.dtype).masked_fill(never[:, None], 0.0)
        left = (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0)
        copies = torch.sigmoid(-logit)  # 1 - g, exact where g is nearly 1
        shares = torch.cat([torch.sigmoid(logit) + copies * left, copies * weights], dim=-1)
        return Copying(readouts, shares, source.masked_fill(never, 0))


def copyable(source: Tensor, valid: Tensor) -> Tensor:
    """int64 (B, S), bool (B, S) -> (B, S) with NEVER for </s>, the last valid token of each, and padding."""
    words = torch.cat([valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)
    return source.masked_fill(~words, NEVER)


def within(source: Tensor, vocabulary: Tensor) -> Tensor:
    """int64 (B, S), an ascending vocabulary (L,) -> (B, S) positions in it, NEVER for tokens that it lacks."""
    positions = torch.searchsorted(vocabulary, source).clamp_max(len(vocabulary) - 1)
    return torch.where(vocabulary[positions] == source, positions, NEVER)
