"""Back-pointers: what a search remembers of its steps, and how hypotheses are read off it at the end."""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nmt.search.hypothesis import Hypothesis


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
