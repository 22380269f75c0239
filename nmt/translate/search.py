"""What a search method gets and what it returns: the interface `Search`, the batch, and hypotheses.

Shapes: B sentences, S source positions, T target positions, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from nmt.attention.attention import Steering
from nmt.config.checks import config_dir, validated_union
from nmt.config.schema import training as schema
from nmt.model.seq2seq import StateT, Step
from nmt.translate.forbidden import Forbidden
from nmt.translate.translation import Translation

Flags = NDArray[np.bool_]
Ids = NDArray[np.int64]
Attend = Mapping[int, int | Sequence[float]]
"""Step -> the source position that has attention weight 1, or the weights of all positions. Both count from 0."""

EXTRA_TOKENS = 10  # a translation may be this much longer than search.max_ratio times its source


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence."""

    tokens: list[int]  # eos last, without bos
    score: float  # the search ranks hypotheses by it, see Search.score
    log_prob: float  # natural logarithm of the probability of all `tokens`
    attention: Tensor | None  # (T, S) weights, float32 on the CPU, a row for each token; None without attention
    token_log_probs: list[float]  # log-probability of each token; they sum to log_prob


class Symbols(NamedTuple):
    """Special token ids. `banned` tokens are never generated; `eos` must not be among them."""

    bos: int
    eos: int
    banned: tuple[int, ...]

    def within(self, shortlist: Ids) -> Self:
        """Replace special tokens by their positions in a shortlist."""
        bos, eos = np.searchsorted(shortlist, (self.bos, self.eos)).tolist()
        return self._replace(bos=bos, eos=eos, banned=tuple(np.flatnonzero(np.isin(shortlist, self.banned)).tolist()))


def max_tokens(settings: schema.SearchLimits, length: int) -> int:
    """Return the maximum number of tokens, including </s>, in a translation of `length` source tokens."""
    return min(settings.max_length, int(settings.max_ratio * length) + EXTRA_TOKENS)


@dataclass(frozen=True)
class Limits:
    """Limits on the hypotheses of each sentence b: they start with the tokens `prefixes[b]`, and have at least
    `min_length` tokens before eos and at most `max_lengths[b]` tokens including eos. Where limits conflict, the prefix
    has precedence over the maximum, and the maximum over the minimum."""

    min_length: int
    max_lengths: list[int]  # each at least 1, and greater than the length of the prefix
    prefixes: Sequence[Sequence[int]] = ()  # empty, or one for each sentence

    @classmethod
    def of(cls, settings: schema.SearchLimits, lengths: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Self:
        """Make the limits of sentences with these numbers of source tokens."""
        most = [max_tokens(settings, length) for length in lengths]
        if prefixes:
            most = [max(length, len(prefix) + 1) for length, prefix in zip(most, prefixes, strict=True)]
        return cls(max(0, settings.min_length - 1), most, prefixes)

    def forced(self, step: int, sentence: int, eos: int) -> int | None:
        """Return the token that must follow at a step, counted from 0; None where several may."""
        if self.prefixes and step < len(self.prefixes[sentence]):
            return self.prefixes[sentence][step]
        return eos if step + 1 >= self.max_lengths[sentence] else None


class Guidance(NamedTuple):
    """The user's controls of B sentences, with phrases as tokens. `attend` and `forbidden` hold for every sentence."""

    prefixes: Sequence[Sequence[int]] = ()  # empty, or for each sentence the tokens that its translation starts with
    attend: Attend = MappingProxyType({})
    constraints: Sequence[Sequence[Sequence[int]]] = ()  # empty, or for each sentence the phrases of its translation
    forbidden: Forbidden | None = None
    boundary: Flags = np.zeros(0, np.bool_)  # (V,) the tokens that do not continue a word; for constraints

    def of(self, indices: Sequence[int]) -> Self:
        """Select the guidance of the sentences with these indices."""
        return self._replace(
            prefixes=[self.prefixes[i] for i in indices] if self.prefixes else (),
            constraints=[self.constraints[i] for i in indices] if self.constraints else (),
        )

    def tokens(self) -> list[int]:
        """List all tokens of prefixes and constraints."""
        return [*chain.from_iterable(self.prefixes), *chain.from_iterable(chain.from_iterable(self.constraints))]

    def within(self, shortlist: Ids) -> Self:
        """Replace each token by its position in a shortlist. The shortlist must contain all of `tokens()`."""

        def positions(tokens: Sequence[int]) -> list[int]:
            return [int(position) for position in np.searchsorted(shortlist, tokens)]

        return self._replace(
            prefixes=[positions(prefix) for prefix in self.prefixes],
            constraints=[[positions(phrase) for phrase in phrases] for phrases in self.constraints],
            forbidden=None if self.forbidden is None else self.forbidden.within(shortlist),
            boundary=self.boundary[shortlist] if len(self.boundary) else self.boundary,
        )

    def steering(self, lengths: Sequence[int], device: torch.device) -> Steering | None:
        """Make the Steering of the first L steps for B sentences of these lengths; None if no step is steered."""
        if not self.attend:
            return None
        L, S = max(self.attend) + 1, max(lengths)
        weights, steered = torch.zeros(len(lengths), L, S), torch.zeros(len(lengths), L, dtype=torch.bool)
        for step, target in self.attend.items():
            if isinstance(target, int | np.integer):
                weights[:, step, int(target)] = 1.0
            else:
                weights[:, step, : len(target)] = torch.tensor(target)
            steered[:, step] = True
        return Steering(weights.to(device), steered.to(device))


NO_GUIDANCE = Guidance()


@dataclass(frozen=True)
class SearchBatch(Generic[StateT]):
    """Sentences to search together. With a shortlist, tokens are positions in it during the search; only the results,
    `Hypothesis` and `Node`, have token ids."""

    step: Step[StateT]
    state: StateT  # before the first step, one row for each sentence
    symbols: Symbols
    limits: Limits
    device: torch.device
    lengths: Sequence[int] = ()  # number of source tokens of each sentence, including </s>
    keys: Callable[[], Tensor] | None = None  # returns int64 (B,) on the CPU: seeds of each sentence's random draws
    guidance: Guidance = NO_GUIDANCE
    shortlist: Sequence[int] | None = None  # token id at each position; None without a shortlist

    def repeated(self, n: int) -> "SearchBatch[StateT]":
        """Repeat each sentence's state and limits n times, in neighbouring rows."""
        rows = [sentence for sentence in range(len(self.limits.max_lengths)) for _ in range(n)]
        limits = replace(
            self.limits,
            max_lengths=[self.limits.max_lengths[row] for row in rows],
            prefixes=[self.limits.prefixes[row] for row in rows] if self.limits.prefixes else (),
        )
        state = self.state.select(torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True))
        return replace(self, state=state, limits=limits)


SettingsT = TypeVar("SettingsT", bound=schema.SearchLimits)


class Search(ABC, Generic[SettingsT]):
    """A search method, with its settings from the configuration."""

    beam_size = 1  # number of hypotheses of a sentence that share its memory at each step
    takes_constraints = False  # whether it uses the constraints of `SearchBatch.guidance`

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    @abstractmethod
    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each sentence, best first; fewer if fewer have a probability above 0."""

    def width(self, n: int) -> int:
        """Return how many hypotheses of a sentence each step extends in a search for the n best."""
        return self.beam_size

    def check_nbest(self, n: int) -> None:
        """Raise UserError if the search method cannot return n translations."""

    def score(self, log_prob: float, length: int, attention: Tensor | None) -> float:
        """Compute the score that the search gives a hypothesis of this log-probability, length and attention (T, S)."""
        return log_prob

    def best(self, candidates: list[Translation], n: int) -> list[Translation]:
        """Choose the n best translations of a sentence. `__call__` has returned the candidates in this order."""
        return candidates


def merge_search(trained: schema.Search, changes: Mapping[str, Any]) -> schema.Search:
    """Return a run's search settings with the changes that are not None. Raises UserError for a wrong value.

    Another `kind` starts from the values in configs/search, but for the limits that all search methods share.
    """
    changes = {key: value for key, value in changes.items() if value is not None}
    values = trained.model_dump()
    if (kind := changes.get("kind", trained.kind)) != trained.kind:
        file = config_dir() / "search" / f"{Path(str(kind)).name}.yaml"
        defaults = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        shared = {key: value for key, value in values.items() if key in schema.SearchLimits.model_fields}
        values = {key: value for key, value in defaults.items() if key != "defaults"} | shared
    search: schema.Search = validated_union(schema.Search, {**values, **changes}, "search")
    return search
