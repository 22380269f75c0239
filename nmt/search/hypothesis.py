"""Types shared by all searches.

Shapes: B sentences, N hypotheses (the rows of a step), S source positions, T target positions, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Literal, NamedTuple, Protocol, Self, TypeVar, assert_never

import torch
from torch import Tensor


class State(Protocol):
    """What a model carries from step to step, one row per hypothesis."""

    def select(self, index: Tensor) -> Self:
        """int64 rows `(M,)`, which may repeat -> the state of these rows: reordered, shrunk or expanded."""
        ...

    def branch(self, index: Tensor, sentences: Tensor | None) -> Self:
        """The same for rows grouped by sentence, equally many for each, which may share what is the sentence's.

        `sentences`, int64 `(A,)`, are the sentences kept, of those before; None: all.
        """
        ...


StateT = TypeVar("StateT", bound=State)


class StepOutput(NamedTuple, Generic[StateT]):
    """logits `(N, V)`, weights `(N, S)` or None without attention, and the state after the step.

    The weights are those the logits were computed with. They must not be overwritten by later steps.
    """

    logits: Tensor
    weights: Tensor | None
    state: StateT


Step = Callable[[Tensor, StateT], StepOutput[StateT]]
"""Previous tokens `(N,)` int64 and a state of N rows -> the output for the next token."""


class Symbols(NamedTuple):
    """The ids a search must know; `banned` ones are never generated and do not include `eos`."""

    bos: int
    eos: int
    banned: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens: at least `min_length` before eos; at most `max_lengths[b]` for sentence b, with eos.

    Where the two disagree, the maximum wins. Raises ValueError for a negative minimum or a maximum below 1.
    """

    min_length: int
    max_lengths: list[int]

    def __post_init__(self) -> None:
        if self.min_length < 0:
            raise ValueError(f"min_length is {self.min_length}, but must be at least 0 (0 for no minimum)")
        if min(self.max_lengths, default=1) < 1:
            raise ValueError(f"max_lengths holds {min(self.max_lengths)}, but each must be at least 1 for eos")


@dataclass(frozen=True)
class LengthPenalty:
    """The divisor of a hypothesis's log-probability; never falls with the length, which counts eos.

    none: 1; average: length^alpha; gnmt: ((5 + length) / 6)^alpha (Wu et al. 2016, eq. 14).
    Raises ValueError for a negative alpha.
    """

    kind: Literal["none", "average", "gnmt"]
    alpha: float

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"the length penalty's alpha is {self.alpha}, but must be at least 0")

    def __call__(self, length: int) -> float:
        match self.kind:
            case "none":
                return 1.0
            case "average":
                return float(length**self.alpha)
            case "gnmt":
                return float(((5 + length) / 6) ** self.alpha)
        assert_never(self.kind)


@dataclass(frozen=True)
class Hypothesis:
    """One translation as a search found it.

    `tokens` lack bos and end with eos. `score`, the log-probability over its length penalty, is what
    hypotheses are ranked by; `log_prob` is natural. `attention` `(T, S)`, float32 on the CPU, holds the row
    of each token in `tokens`; it is None for a model without attention.
    """

    tokens: list[int]
    score: float
    log_prob: float
    attention: Tensor | None


class Ending(NamedTuple):
    """A finished hypothesis: the row of the step (from 0) at which eos was chosen, and what it is worth."""

    step: int
    row: int
    log_prob: float
    score: float


class History:
    """Per step, for every row of the batch: its input token, its row at the step before, its attention.

    A step therefore costs its own rows alone, however long the prefixes are.
    """

    def __init__(self, eos: int) -> None:
        self._eos = eos
        self._tokens: list[list[int]] = []
        self._parents: list[list[int]] = []
        self._weights: list[Tensor] = []

    def attend(self, weights: Tensor | None) -> None:
        """Records the attention `(N, S)` of the current step's rows."""
        if weights is not None:
            self._weights.append(weights)

    def advance(self, parents: list[int], tokens: list[int]) -> None:
        """Records the next step's rows: for each, the current row it extends, and by which token."""
        self._parents.append(parents)
        self._tokens.append(tokens)

    def hypotheses(self, endings: list[list[Ending]]) -> list[list[Hypothesis]]:
        """One list of hypotheses per list of endings, in the same order."""
        paths = [self._path(ending) for group in endings for ending in group]
        found = zip(paths, self._attention(paths), strict=True)
        return [[self._hypothesis(ending, *next(found)) for ending in group] for group in endings]

    def _path(self, ending: Ending) -> list[int]:
        """The rows through which a hypothesis went, from step 0 to its last."""
        path = [ending.row]
        for parents in reversed(self._parents[: ending.step]):
            path.append(parents[path[-1]])
        return path[::-1]

    def _hypothesis(self, ending: Ending, path: list[int], attention: Tensor | None) -> Hypothesis:
        # The input of step t + 1 is the token chosen at step t.
        tokens = [step[row] for step, row in zip(self._tokens, path[1:], strict=False)]
        return Hypothesis([*tokens, self._eos], ending.score, ending.log_prob, attention)

    def _attention(self, paths: list[list[int]]) -> list[Tensor] | list[None]:
        """The rows `(T, S)` of every path, fetched from the device at once."""
        if not self._weights or not paths:
            return [None] * len(paths)
        offsets = list(accumulate((len(weights) for weights in self._weights), initial=0))
        index = [offset + row for path in paths for offset, row in zip(offsets, path, strict=False)]
        weights = torch.cat(self._weights)
        rows = weights[torch.tensor(index).to(weights.device, non_blocking=True)].float().cpu()
        return list(torch.split(rows, [len(path) for path in paths]))
