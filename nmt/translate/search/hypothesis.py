"""Types and bookkeeping that all searches share: step function, limits, length penalty, hypotheses, back-pointers.

Shapes: N hypotheses (the rows of a step), S source positions, T target positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor


class Symbols(NamedTuple):
    """Special token ids. `banned` tokens are never generated; `eos` must not be among them."""

    bos: int
    eos: int
    banned: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Tokens per hypothesis: at least `min_length` without eos, at most `max_lengths[b]` with eos for sentence b, whose
    hypotheses start with the tokens `prefixes[b]`.

    Where these conflict, prefixes count first, then the maximum. Raises ValueError for a negative minimum, a maximum
    below 1, or a prefix that leaves no room for eos.
    """

    min_length: int
    max_lengths: list[int]
    prefixes: Sequence[Sequence[int]] = ()  # one per sentence, or none at all

    def forced(self, step: int, sentence: int, eos: int) -> int | None:
        """The only token that may follow at this step, counted from 0; None for any."""
        if self.prefixes and step < len(self.prefixes[sentence]):
            return self.prefixes[sentence][step]
        return eos if step + 1 >= self.max_lengths[sentence] else None

    def repeated(self, n: int) -> "Limits":
        """Each sentence n times."""
        lengths = [length for length in self.max_lengths for _ in range(n)]
        return Limits(self.min_length, lengths, [prefix for prefix in self.prefixes for _ in range(n)])

    def __post_init__(self) -> None:
        if self.min_length < 0:
            raise ValueError(f"min_length is {self.min_length}, but must be at least 0 (0 for no minimum)")
        if min(self.max_lengths, default=1) < 1:
            raise ValueError(f"max_lengths holds {min(self.max_lengths)}, but each must be at least 1 for eos")
        if any(len(prefix) >= most for prefix, most in zip(self.prefixes, self.max_lengths, strict=False)):
            raise ValueError("max_lengths must be above the lengths of the prefixes, for eos")


@dataclass(frozen=True)
class LengthPenalty:
    """Divisor of a hypothesis's log-probability, which never decreases with the length (eos counted).

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


NO_PENALTY = LengthPenalty("none", 0.0)


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence."""

    tokens: list[int]  # without bos, eos last
    score: float  # log_prob / length penalty + coverage, by which hypotheses are ranked
    log_prob: float  # natural logarithm
    attention: Tensor | None  # (T, S) float32 on the CPU, a row for each of `tokens`; None without attention
    token_log_probs: list[float]  # of each of `tokens`, which sum to log_prob


class Ending(NamedTuple):
    """A finished hypothesis in a `History`: step (from 0) and row at which eos was chosen."""

    step: int
    row: int
    log_prob: float
    score: float


class History:
    """Back-pointers: token, parent row, log-probability and attention of every row of every step.

    Adding a step costs the same however long the prefixes are. `hypotheses` follows the pointers at the end.
    """

    def __init__(self, eos: int) -> None:
        self._eos = eos
        self._tokens: list[list[int]] = []
        self._parents: list[list[int]] = []
        self._weights: list[Tensor] = []
        self._totals: list[Tensor] = []

    def add(self, totals: Tensor, weights: Tensor | None) -> None:
        """Record the current step: log-probabilities (N,) of the hypotheses before it, and its attention (N, S)."""
        self._totals.append(totals)
        if weights is not None:
            self._weights.append(weights)

    def advance(self, parents: list[int], tokens: list[int]) -> None:
        """Start the next step: the current row that each new row extends, and the token that extends it."""
        self._parents.append(parents)
        self._tokens.append(tokens)

    def hypotheses(self, endings: list[list[Ending]]) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence's endings, in the same order."""
        paths = [self._path(ending) for sentence in endings for ending in sentence]
        totals = [part.tolist() for part in _along(paths, self._totals)]
        weights = _along(paths, self._weights) if self._weights else [None] * len(paths)
        results = zip(paths, totals, weights, strict=True)
        return [[self._hypothesis(ending, *next(results)) for ending in sentence] for sentence in endings]

    def _path(self, ending: Ending) -> list[int]:
        """The hypothesis's row at each step, from step 0."""
        path = [ending.row]
        for parents in reversed(self._parents[: ending.step]):
            path.append(parents[path[-1]])
        return path[::-1]

    def _hypothesis(self, ending: Ending, path: list[int], totals: list[float], attention: Tensor | None) -> Hypothesis:
        # The input of step t + 1 is the token chosen at step t.
        tokens = [step[row] for step, row in zip(self._tokens, path[1:], strict=False)]
        log_probs = [after - before for before, after in pairwise([*totals, ending.log_prob])]
        return Hypothesis([*tokens, self._eos], ending.score, ending.log_prob, attention, log_probs)


def _along(paths: list[list[int]], steps: list[Tensor]) -> list[Tensor]:
    """(N, ...) of each step -> (T, ...) along each path, float32, copied from the device in one transfer."""
    if not paths:
        return []
    offsets = list(accumulate((len(step) for step in steps), initial=0))
    index = [offset + row for path in paths for offset, row in zip(offsets, path, strict=False)]
    joined = torch.cat(steps)
    rows = joined[torch.tensor(index).to(joined.device, non_blocking=True)].float().cpu()
    return list(torch.split(rows, [len(path) for path in paths]))
