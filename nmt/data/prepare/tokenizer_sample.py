"""The lines that a tokenizer is trained on: a random sample, drawn while the corpus is read once."""

from collections.abc import Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SEED = 1
STEP = 2**16  # lines read at a time
ALL = 2.0  # a threshold above every priority

Array = NDArray[Any]
Thresholds = tuple[float, float]  # of sources and targets


class Candidates(NamedTuple):
    """Lines of one side that may belong to the sample."""

    priorities: Array  # float64 (N,)
    text: bytes  # N lines

    @classmethod
    def draw(cls, lines: Sequence[str], threshold: float, seed: Sequence[int]) -> "Candidates":
        """Give each line a random priority in [0, 1) and choose those below the threshold."""
        priorities = np.random.default_rng([SEED, *seed]).random(len(lines))
        chosen = priorities < threshold
        return cls(priorities[chosen], "".join(f"{line}\n" for line in compress(lines, chosen)).encode())


class TokenizerSample:
    """The `max_lines` lines of lowest priority, of both sides together or of each, in their order in the corpus.

    The candidates are in files: about max_lines (1 + log(lines / max_lines)) lines, if there are more than max_lines.
    """

    def __init__(self, directory: Path, max_lines: int, joint: bool) -> None:
        self._paths = [directory / f"sample.{side}" for side in ("source", "target")]
        self._max_lines, self._joint = max_lines, joint
        self._thresholds = [ALL, ALL]
        self._lowest: list[list[Array]] = [[] for _ in range(1 if joint else 2)]  # priorities of candidates

    @property
    def thresholds(self) -> Thresholds:
        """Priorities above which lines are certainly not in the sample."""
        source, target = self._thresholds
        return source, target

    def add(self, source: Candidates, target: Candidates) -> None:
        """The next candidates, drawn with thresholds of now or before."""
        for side, (path, (priorities, text)) in enumerate(zip(self._paths, (source, target), strict=True)):
            with path.open("ab") as file:
                file.write(text)
            with _priorities(path).open("ab") as file:
                file.write(priorities.tobytes())
            group = 0 if self._joint else side
            self._lowest[group].append(priorities)
            self._prune(group, 2 * self._max_lines)

    def _prune(self, group: int, limit: int) -> None:
        """Drop all but the lowest priorities if there are more than `limit`."""
        if sum(map(len, self._lowest[group])) <= limit:
            return
        lowest = np.partition(np.concatenate(self._lowest[group]), self._max_lines)
        self._lowest[group] = [lowest[: self._max_lines]]
        for side in (0, 1) if self._joint else (group,):
            self._thresholds[side] = float(lowest[self._max_lines])

    def lines(self, side: int) -> Iterator[str]:
        """The sample's sources (0) or targets (1)."""
        self._prune(0 if self._joint else side, self._max_lines)
        path, threshold = self._paths[side], self._thresholds[side]
        with path.open(encoding="utf-8", newline="\n") as text, _priorities(path).open("rb") as file:
            while step := file.read(8 * STEP):
                chosen = (np.frombuffer(step) < threshold).tolist()
                yield from (line[:-1] for line in compress(islice(text, len(chosen)), chosen))

    def delete(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
            _priorities(path).unlink(missing_ok=True)


def _priorities(path: Path) -> Path:
    return path.with_name(f"{path.name}.priorities")
