"""Ensembles: several models that translate together.

Shapes: B batch, S source positions, T target positions, V vocabulary, K models.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from nmt.attention.steering import Steering
from nmt.model.seq2seq import Forced, Seq2Seq
from nmt.model.state import DecoderState, StepOutput


class EnsembleState(NamedTuple):
    """The state of each model's decoder."""

    members: tuple[DecoderState, ...]

    def steered(self, steering: Steering) -> Self:
        """See DecoderState.steered."""
        return self._replace(members=tuple(member.steered(steering) for member in self.members))

    def select(self, index: Tensor) -> Self:
        """Rows `index` of the batch, which may repeat."""
        return self._replace(members=tuple(member.select(index) for member in self.members))

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """Reorder hypotheses; see nmt.model.state.State."""
        return self._replace(members=tuple(member.branch(index, sentences) for member in self.members))


class Member(Protocol):
    """A model that translates step by step: a Seq2Seq, or one prepared for search."""

    @property
    def attends(self) -> bool:
        """Does it have an attention?"""
        ...

    @property
    def encode(self) -> Callable[..., DecoderState]:
        """See Seq2Seq.encode and SearchModel.encode."""
        ...

    def step(self, tokens: Tensor, state: DecoderState) -> StepOutput[DecoderState]:
        """See Seq2Seq.step."""
        ...


class SearchEnsemble:
    """p(y_t | y_<t, x) = 1/K sum_k p_k(y_t | y_<t, x)   (ensembles: Sutskever et al. 2014, 3.6).

    The models may differ in everything but their vocabularies. Attention weights are averaged over the models that have
    an attention.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)

    @property
    def attends(self) -> bool:
        """Does any model have an attention?"""
        return any(member.attends for member in self.members)

    def encode(self, source: Tensor, lengths: Tensor, *vocabulary: Tensor) -> EnsembleState:
        """int64 (B, S), int64 (B,) on the CPU -> the decoders' states before their first step. vocabulary: see
        SearchModel.encode."""
        return EnsembleState(tuple(member.encode(source, lengths, *vocabulary) for member in self.members))

    def step(self, tokens: Tensor, state: EnsembleState) -> StepOutput[EnsembleState]:
        """Previous tokens, int64 (B,) -> logarithm of the members' mean probabilities of the next token, float32
        (B, V), their mean attention (B, S), and the next state."""
        steps = [member.step(tokens, own) for member, own in zip(self.members, state.members, strict=True)]
        log_probs = log_mean([step.logits.log_softmax(-1, dtype=torch.float32) for step in steps])
        return StepOutput(log_probs, _mean([s.weights for s in steps]), EnsembleState(tuple(s.state for s in steps)))


class Ensemble(nn.Module, SearchEnsemble):
    """A SearchEnsemble of whole models, which can also score translations."""

    def __init__(self, members: Sequence[Seq2Seq]) -> None:
        nn.Module.__init__(self)
        SearchEnsemble.__init__(self, members)
        self.models = tuple(members)
        self._registered = nn.ModuleList(members)

    @property
    def has_copy_gate(self) -> bool:
        """Does any model copy source tokens?"""
        return any(model.has_copy_gate for model in self.models)

    def force(
        self,
        source: Tensor,
        lengths: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        pad: int,
        steering: Steering | None = None,
        detailed: bool = False,
    ) -> Forced:
        """As Seq2Seq.force: the logarithm of each token's mean probability, the mean attention, no detail."""
        forced = [member.force(source, lengths, target_in, target_out, pad, steering) for member in self.models]
        return Forced(log_mean([member.log_probs for member in forced]), _mean([member.weights for member in forced]))


def log_mean(log_probs: Sequence[Tensor]) -> Tensor:
    """K x (...) log-probabilities -> log(1/K sum_k exp(...)), exact if all are equal."""
    highest = reduce(torch.maximum, log_probs)
    total = torch.zeros_like(highest)
    for member in log_probs:
        total += (member - highest).exp_()
    return total.div_(len(log_probs)).log_().add_(highest)


def _mean(weights: Sequence[Tensor | None]) -> Tensor | None:
    present = [each.float() for each in weights if each is not None]
    return torch.stack(present).mean(0) if present else None
