"""From decoder state and context to the distribution of the next token: readout, output layer, prediction.

For each step a decoder predicts from one readout, from a mixture of several, or from one readout and source tokens that
may be copied.

Shapes: C passes over a batch (R-Drop), B sentences, T target positions or hypotheses of a sentence, S source positions,
H width of a hidden state, M width of the memory, E width of an embedding, K readouts of a target position, R width of
the readout, P width of the readout before its activation, V vocabulary, L vocabulary of a shortlist.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nmt.ops.output_loss import (
    Criterion,
    OutputLoss,
    SeveralReadouts,
    copied_log_probs,
    mean_over_mixture,
    mixture_log_probs,
    of_mixture,
    output_loss,
    target_log_probs,
    with_copies,
)
from nmt.ops.products import Linear, linear, matmul, wide
from nmt.ops.trees import map_tensors

MIN_NORM = 0.01  # fixnorm divides a row of the output layer by its norm, or by this if the norm is smaller
NEVER = -1  # stands for a source token that cannot be copied


class Readout(nn.Module):
    """Computes the output layer's input from the decoder's output s, the context c and the previous word y.

    attentional: tanh(W [s; c]) (Luong et al. 2015, eq. 5); deep: tanh(W [s; c; y]) (Pascanu et al. 2014);
    maxout: the maximum of each pair of elements of W [s; c; y] (Goodfellow et al. 2013; Bahdanau et al. 2015, A.2.2).
    A context_dim of 0 leaves c out.
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
        self.sizes = [state_dim, context_dim, word_dim]  # widths of s, c and y; 0 for c or y if it is not read
        self.proj = Linear(sum(self.sizes), width)

    def activation(self, projected: Tensor) -> Tensor:
        """Apply the activation to the product with W: (..., P) -> (..., R), where P is 2 R for maxout and else R."""
        if self.kind == "maxout":
            return projected.reshape(*projected.shape[:-1], -1, 2).amax(-1)
        return torch.tanh(projected)


class LexicalModel(nn.Module):
    """A direct path from source words to the readout, so that rare words are less often mistranslated.

    Computes tanh(W f + b) + f with f = tanh(sum over s of a_s e_s), where e_s are the embeddings of the source tokens
    and a_s their attention weights (Nguyen and Chiang 2018, section 4). The decoder adds the result to the readout,
    while in the paper a second output layer reads it.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = Linear(dim, dim)

    def forward(self, weights: Tensor, words: Tensor) -> Tensor:
        """Compute the result from weights and embedded source: (B, T, S), (B, S, E) -> (B, T, E)."""
        return self.of_attended(torch.bmm(weights.to(words.dtype), words))

    def of_attended(self, words: Tensor) -> Tensor:
        """Compute the result from a weighted sum of embeddings, or from one embedding: (..., E) -> (..., E)."""
        attended = torch.tanh(words)
        projected: Tensor = self.proj(attended)
        return torch.tanh(projected) + attended


class OutputLayer(NamedTuple):
    """The output layer's parameters, ready for products with any number of readouts."""

    weight: Tensor  # (V, R), one row for each token; a search may pack it
    bias: Tensor  # (V,)
    scale: Tensor | None  # () the factor g of fixnorm, see Output; None without fixnorm

    def operands(self, readouts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return readouts (..., R), weight and bias, from which `linear` computes logits. With fixnorm, readouts are
        scaled."""
        scaled = readouts if self.scale is None else self.scale * normalize(readouts, dim=-1)
        return scaled, self.weight, self.bias

    def logits(self, readouts: Tensor) -> Tensor:
        """Compute logits: (..., R) -> (..., V)."""
        return linear(*self.operands(readouts))


class Output(Linear):
    """The output layer: the logits of a readout r are W r + b.

    With fixnorm they are g cos(w_v, r) + b_v, so that frequent words gain nothing from their long rows w_v (Nguyen and
    Chiang 2018, section 3). g is learned and starts at sqrt(R), as in Nguyen and Salazar (2019).
    """

    def __init__(self, readout_dim: int, vocabulary: int, fixnorm: bool = False) -> None:
        super().__init__(readout_dim, vocabulary)
        self.scale = nn.Parameter(torch.tensor(readout_dim**0.5)) if fixnorm else None

    def forward(self, readouts: Tensor) -> Tensor:
        return self.layer().logits(readouts)

    def layer(self) -> OutputLayer:
        """Return the parameters as products read them: with fixnorm, each row of the weight is divided by its norm."""
        # With tied embeddings, the row of padding starts as zeros. There `eps` bounds the gradient of `normalize`.
        weight = self.weight if self.scale is None else normalize(self.weight, dim=-1, eps=MIN_NORM)
        return OutputLayer(weight, self.bias, self.scale)


class Components(NamedTuple):
    """What the distributions of n target positions are mixed from: K distributions of the output layer for each
    position, and S source tokens that may be copied."""

    readouts: Tensor  # (n, K, R); the output layer makes a distribution from each of the K readouts
    shares: Tensor  # (n, K + S) share of each of the K distributions and of each source token; S = 0 without copying
    tokens: Tensor  # int64 (n, S) source tokens

    def probabilities(self, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the mixed distributions with an output layer: weight (V, R), bias (V,) -> (n, V)."""
        probs, shares = matmul(self.readouts, weight, bias).softmax(-1, dtype=dtype), self.shares
        if self.tokens.shape[1]:
            shares = shares.to(dtype)
            return (probs[:, 0] * shares[:, :1]).scatter_add_(-1, self.tokens, shares[:, 1:])
        if probs.shape[1] == 1:
            return probs[:, 0]
        with torch.autocast(probs.device.type, enabled=False):
            return torch.bmm(shares[:, None].to(dtype), probs)[:, 0]


class Prediction(ABC):
    """A decoder's result, from which an output layer computes the distributions of T tokens of B sentences."""

    readouts: Tensor  # (B, T, R), or (B, T, K, R) in a mixture

    @abstractmethod
    def loss(
        self, output: OutputLayer, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
    ) -> OutputLoss:
        """Compute the criterion's sum over all target tokens, and its terms (B, T), which are 0 at padding.

        The prediction may hold C passes over the batch: it has C * B rows for targets int64 (B, T). by_position:
        further tensors (B * T, ...) that the criterion reads after the targets.
        """

    @abstractmethod
    def logits(self, output: OutputLayer) -> Tensor:
        """Compute logits (B, T, V). Where several distributions are mixed, these are log-probabilities."""

    def log_probs(self, output: OutputLayer) -> Tensor:
        """Compute log-probabilities (B, T, V)."""
        return self.logits(output)

    @abstractmethod
    def at(self, rows: Tensor, steps: Tensor) -> "Prediction":
        """Take step `steps[n]` of row `rows[n]` for each n: int64 (N,), int64 (N,) -> a prediction (N, 1, ...)."""

    @abstractmethod
    def components(self) -> Components:
        """Return the components of each of the B * T distributions."""

    def posterior_weights(self, weights: Tensor | None, output: OutputLayer, target: Tensor) -> Tensor | None:
        """Compute the attention weights (B, T, S) given also the predicted tokens y_1 ... y_T, int64 (B, T). Only a
        mixture has a posterior; other predictions return `weights` unchanged."""
        return weights


@dataclass(frozen=True)
class Readouts(Prediction):
    """One readout for each step; the dimension T may be absent."""

    readouts: Tensor  # (B, T, R)

    def loss(
        self, output: OutputLayer, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
    ) -> OutputLoss:
        passes = len(self.readouts) // len(targets)
        operands = output.operands(self.readouts.reshape(passes, targets.numel(), -1))
        return output_loss(*operands, targets != pad, criterion, targets.flatten(), *by_position)

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
    """A mixture over source positions: p(y_t) = sum over s of a_ts p(y_t | h_s).

    Each position s has the weight a_ts and a readout, which is computed from its encoder state h_s in place of the mean
    context (Deng et al. 2018, 2.1; Wu et al. 2018).
    """

    readouts: Tensor  # (B, T, K, R)
    weights: Tensor  # (B, T, K); a row sums to 1, or to 0 in a sentence without source positions
    positions: Tensor | None  # int64 (B, T, K) source positions; None if they are all S positions in order
    # True if the weights average the losses of the K readouts (for the evidence lower bound), False if they average
    # the probabilities
    averages_losses: bool = False

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return readouts, weights and positions."""
        return self.readouts, self.weights, self.positions

    def loss(
        self, output: OutputLayer, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
    ) -> OutputLoss:
        passes, K = len(self.weights) // len(targets), self.weights.shape[2]
        operands = output.operands(self.readouts.reshape(passes, targets.numel(), K, -1))
        mixed = mean_over_mixture(criterion) if self.averages_losses else of_mixture(criterion)
        weights = self.weights.reshape(passes, -1, K)
        inputs = targets.flatten(), *by_position
        return output_loss(*operands, targets != pad, mixed, *inputs, shares=weights, layout=SeveralReadouts)

    def logits(self, output: OutputLayer) -> Tensor:
        B, T, _ = self.weights.shape
        log_probs = mixture_log_probs(*output.operands(self.readouts.flatten(0, 1)), self.weights.flatten(0, 1))
        return log_probs.view(B, T, -1)

    def at(self, rows: Tensor, steps: Tensor) -> "Mixture":
        return Mixture(*map_tensors(lambda part: part[rows, steps][:, None], self.parts))

    def before_last(self) -> "Mixture":
        """Take all steps but the last."""
        return Mixture(*map_tensors(lambda part: part[:, :-1], self.parts))

    def components(self) -> Components:
        rows = self.readouts.flatten(0, 1)
        return Components(rows, self.weights.flatten(0, 1), rows.new_empty(len(rows), 0, dtype=torch.int64))

    def token_log_probs(self, output: OutputLayer, tokens: Tensor) -> Tensor:
        """Compute log p(y_t | h_s) of tokens y_t, int64 with B * T elements -> (B, T, K), 0 where the weight is 0."""
        operands = output.operands(self.readouts.flatten(0, 1))
        log_probs = target_log_probs(*operands, self.weights.flatten(0, 1), tokens.flatten())
        return log_probs.view_as(self.weights)

    def posterior(self, log_probs: Tensor) -> Tensor:
        """Compute p(s | token) by Bayes' rule from the token's log-probabilities: (B, T, K) -> (B, T, K)   (Shankar and
        Sarawagi 2019, eq. 3)."""
        nowhere = self.weights == 0
        joint = (self.weights.masked_fill(nowhere, 1.0).log() + log_probs).masked_fill(nowhere, torch.finfo().min)
        return joint.softmax(-1).masked_fill(nowhere, 0.0)

    def posterior_weights(self, weights: Tensor | None, output: OutputLayer, target: Tensor) -> Tensor | None:
        assert weights is not None
        return self.spread(self.posterior(self.token_log_probs(output, target)), weights.shape[-1])

    def spread(self, weights: Tensor, length: int) -> Tensor:
        """Place weights (B, T, K) at the source positions of this mixture -> (B, T, S)."""
        if self.positions is None:
            return weights
        return weights.new_zeros(*weights.shape[:2], length).scatter(-1, self.positions, weights)


@dataclass(frozen=True)
class Copying(Prediction):
    """One readout for each step, and source tokens that may be copied (See et al. 2017, 2.2; Gu et al. 2016)."""

    readouts: Tensor  # (B, T, R)
    shares: Tensor  # (B, T, 1 + S) share of the output layer's distribution and of each source token; a row sums to 1
    source: Tensor  # int64 (B, S) source tokens; a token that cannot be copied has share 0 and is replaced by 0

    def loss(
        self, output: OutputLayer, targets: Tensor, pad: int, criterion: Criterion, *by_position: Tensor
    ) -> OutputLoss:
        B, T = targets.shape
        rows, shares = (part.reshape(-1, B * T, part.shape[-1]) for part in (self.readouts, self.shares))
        sentences = torch.arange(B, device=targets.device).repeat_interleave(T)
        mixed = with_copies(criterion, self.source[:B])  # all passes have the same source tokens
        inputs = sentences, targets.flatten(), *by_position
        return output_loss(*output.operands(rows), targets != pad, mixed, *inputs, shares=shares)

    def logits(self, output: OutputLayer) -> Tensor:
        tokens = self.source[:, None].expand(-1, self.readouts.shape[1], -1)
        return copied_log_probs(output.logits(self.readouts), self.shares, tokens)

    def at(self, rows: Tensor, steps: Tensor) -> "Copying":
        return Copying(self.readouts[rows, steps][:, None], self.shares[rows, steps][:, None], self.source[rows])

    def components(self) -> Components:
        tokens = self.source.repeat_interleave(self.readouts.shape[1], dim=0)
        return Components(self.readouts.flatten(0, 1)[:, None], self.shares.flatten(0, 1), tokens)


class CopyGate(nn.Module):
    """Lets a prediction copy source tokens: p(w) = g p_vocab(w) + (1 - g) sum of a_s over the positions s with source
    token w   (See et al. 2017, eq. 9), with p_vocab from the output layer and attention weights a_s.

    The gate g = sigmoid(v . r + b) reads the readout r, while in eq. 8 it reads context, decoder output and previous
    word. So a search computes g from the readouts it already has, without further products of contexts and words.

    Some attention weight cannot copy: the weight on </s>, and what is missing where the weights of a window or of
    monotonic reading sum to less than 1. This weight times 1 - g is added to the factor g of p_vocab, so that all
    factors sum to 1.
    """

    def __init__(self, readout_dim: int) -> None:
        super().__init__()
        self.proj = Linear(readout_dim, 1)

    def forward(self, readouts: Tensor, weights: Tensor, source: Tensor) -> Copying:
        """Predict from readouts (B, T, R), attention weights (B, T, S) and the result of `copyable`, int64 (B, S)."""
        logit = self.proj(readouts)
        logit, never = wide(logit), source == NEVER
        weights = weights.to(logit.dtype).masked_fill(never[:, None], 0.0)
        left = (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0)
        copies = torch.sigmoid(-logit)  # 1 - g, but without the rounding error of a difference where g is nearly 1
        shares = torch.cat([torch.sigmoid(logit) + copies * left, copies * weights], dim=-1)
        return Copying(readouts, shares, source.masked_fill(never, 0))


def copyable(source: Tensor, valid: Tensor) -> Tensor:
    """Replace by NEVER what cannot be copied, </s> and padding: source int64 (B, S), valid bool (B, S) -> (B, S). The
    last valid token of each sentence is </s>."""
    words = torch.cat([valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)
    return source.masked_fill(~words, NEVER)


def within(source: Tensor, vocabulary: Tensor) -> Tensor:
    """Find source tokens, int64 (B, S), in an ascending vocabulary (L,) -> (B, S) indices, NEVER for tokens outside."""
    positions = torch.searchsorted(vocabulary, source).clamp_max(len(vocabulary) - 1)
    return torch.where(vocabulary[positions] == source, positions, NEVER)
