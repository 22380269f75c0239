"""What all searches share: the interface of a search, its batch, the next token's log-probabilities, back-pointers.

Shapes: B sentences, N hypotheses (the rows of a step), S source positions, T target positions, V vocabulary, V' the
vocabulary padded to whole blocks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.attention.attention import Steering
from nmt.config import schema
from nmt.config.errors import UserError
from nmt.model.decoder import StateT, Step

if TYPE_CHECKING:
    from nmt.translate.beam import Node, Selection
    from nmt.translate.phrases import Forbidden
    from nmt.translate.translator import Translation

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bans = tuple[list[int], list[int]]
"""Rows, and for each of them a token that may not follow there."""

Attend = Mapping[int, int | Sequence[float]]
"""Step from 0 -> the source position to attend to, from 0, or a weight for every position."""

BLOCK = 64  # columns of a block in `pack_top`
FEW = 2**14  # numbers that are ranked without blocks
_POSITION_BITS = 32
_POSITIONS = 2**_POSITION_BITS - 1
_IMPOSSIBLE = np.int64(np.float32(math.inf).view(np.int32)) << _POSITION_BITS


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence."""

    tokens: list[int]  # without bos, eos last
    score: float  # by which hypotheses are ranked, see Search.score
    log_prob: float  # natural logarithm
    attention: Tensor | None  # (T, S) float32 on the CPU, a row for each of `tokens`; None without attention
    token_log_probs: list[float]  # of each of `tokens`, which sum to log_prob


class Symbols(NamedTuple):
    """Special token ids. `banned` tokens are never generated; `eos` must not be among them."""

    bos: int
    eos: int
    banned: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """Tokens per hypothesis: at least `min_length` without eos, at most `max_lengths[b]` with eos for sentence b, whose
    hypotheses start with the tokens `prefixes[b]`. Where these conflict, prefixes count first, then the maximum.
    """

    min_length: int
    max_lengths: list[int]  # each at least 1, and above the length of the prefix
    prefixes: Sequence[Sequence[int]] = ()  # one per sentence, or none at all

    def forced(self, step: int, sentence: int, eos: int) -> int | None:
        """Return the only token that may follow at this step, counted from 0; None if any may."""
        if self.prefixes and step < len(self.prefixes[sentence]):
            return self.prefixes[sentence][step]
        return eos if step + 1 >= self.max_lengths[sentence] else None


class Guidance(NamedTuple):
    """The controls of B sentences in tokens; `attend` and `forbidden` hold for each of them."""

    prefixes: Sequence[Sequence[int]] = ()  # the tokens that each starts with, without </s>; or none at all
    attend: Attend = MappingProxyType({})
    constraints: Sequence[Sequence[Sequence[int]]] = ()  # the phrases that each must contain; or none at all
    forbidden: "Forbidden | None" = None

    def of(self, indices: Sequence[int]) -> "Guidance":
        """Select the guidance of these sentences."""
        return self._replace(
            prefixes=[self.prefixes[i] for i in indices] if self.prefixes else (),
            constraints=[self.constraints[i] for i in indices] if self.constraints else (),
        )

    def tokens(self) -> list[int]:
        """List all tokens that translations must contain."""
        return [*chain.from_iterable(self.prefixes), *chain.from_iterable(chain.from_iterable(self.constraints))]

    def within(self, shortlist: Ids) -> "Guidance":
        """Replace tokens by their positions in a shortlist, which holds `tokens`."""

        def positions(tokens: Sequence[int]) -> list[int]:
            return [int(position) for position in np.searchsorted(shortlist, tokens)]

        return self._replace(
            prefixes=[positions(prefix) for prefix in self.prefixes],
            constraints=[[positions(phrase) for phrase in phrases] for phrases in self.constraints],
            forbidden=None if self.forbidden is None else self.forbidden.within(shortlist),
        )

    def steering(self, lengths: Sequence[int], device: torch.device) -> Steering | None:
        """Lengths of the B sentences -> Steering of L steps; None if no step is steered."""
        if not self.attend:
            return None
        L, S = max(self.attend) + 1, max(lengths)
        weights, steered = torch.zeros(len(lengths), L, S), torch.zeros(len(lengths), L, dtype=torch.bool)
        for step, target in self.attend.items():
            if isinstance(target, int):
                weights[:, step, target] = 1.0
            else:
                weights[:, step, : len(target)] = torch.tensor(target)
            steered[:, step] = True
        return Steering(weights.to(device), steered.to(device))


class Follower:
    """Follows the hypotheses of a search from step to step."""

    def bans(self) -> Bans:
        """Return rows and tokens that may not follow there at the next step, such as the end of a forbidden phrase."""
        return [], []

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Follow the search by one step: new row i extends row parents[i] by tokens[i]."""


@dataclass(frozen=True)
class SearchBatch(Generic[StateT]):
    """Sentences to search together. With a shortlist, all tokens but those of hypotheses are positions in it."""

    step: Step[StateT]
    state: StateT  # one row for each sentence
    symbols: Symbols
    limits: Limits
    device: torch.device
    lengths: Sequence[int] = ()  # source tokens of each sentence, </s> among them
    keys: Callable[[], Tensor] | None = None  # makes int64 (B,) on the CPU, for each sentence's random draws
    rules: Sequence[Callable[[int], Follower]] = ()  # each makes a follower of a number of rows, which bans tokens
    selection: "Callable[[int, int], Selection] | None" = None  # with constraints: makes it of beam size and eos
    shortlist: Sequence[int] | None = None  # the token of each position

    def repeated(self, n: int) -> "SearchBatch[StateT]":
        """Repeat each sentence n times, in neighbouring rows."""
        rows = [sentence for sentence in range(len(self.limits.max_lengths)) for _ in range(n)]
        limits = replace(
            self.limits,
            max_lengths=[self.limits.max_lengths[row] for row in rows],
            prefixes=[self.limits.prefixes[row] for row in rows] if self.limits.prefixes else (),
        )
        state = self.state.select(torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True))
        return replace(self, state=state, limits=limits)


SettingsT = TypeVar("SettingsT", bound=schema.Search)


class Search(ABC, Generic[SettingsT]):
    """A way to search translations, with its section of the configuration."""

    beam_size = 1  # hypotheses of a sentence that share its memory at each step
    takes_constraints = False  # does it follow the selection of a batch?

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    @abstractmethod
    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        """Return the n best hypotheses of each sentence, best first; fewer if fewer have a probability above 0."""

    def width(self, n: int) -> int:
        """Return the number of hypotheses of a sentence at each step of a search for the n best."""
        return self.beam_size

    def check_nbest(self, n: int) -> None:
        """Raise UserError if the search cannot return n translations."""

    def score(self, log_prob: float, length: int, attention: Tensor | None) -> float:
        """Score a hypothesis of this log-probability, length and attention (T, S) as the search does."""
        return log_prob

    def best(self, candidates: "list[Translation]", n: int) -> "list[Translation]":
        """Choose the n best of a sentence's translations, given in the order of `__call__`."""
        return candidates

    def tree(self, batch: SearchBatch[Any], n: int) -> "tuple[list[list[Hypothesis]], list[list[Node]]]":
        """Search a batch of one sentence; returns the candidates of each step as well. Raises UserError if it has no
        beam."""
        raise UserError(f"a beam's tree needs search=beam, but this search is {self.settings.kind}")


class Mask(NamedTuple):
    """The tokens that may follow each of N hypotheses at one step."""

    may_end: bool
    forced: list[int | None]  # the only token that may follow each row, also where it is banned; None if any may
    bans: Bans

    @classmethod
    def of(
        cls, batch: SearchBatch[Any], step: int, sentences: Sequence[int], width: int, followers: Sequence[Follower]
    ) -> "Mask":
        """Make the mask of `width` hypotheses of each of these sentences at a step, counted from 0."""
        eos, limits = batch.symbols.eos, batch.limits
        forced = [token for s in sentences for token in [limits.forced(step, s, eos)] * width]
        bans = [follower.bans() for follower in followers]
        rows = [row for banned_rows, _ in bans for row in banned_rows]
        return cls(step >= limits.min_length, forced, (rows, [token for _, tokens in bans for token in tokens]))

    def part(self, start: int, end: int) -> "Mask":
        """Select the rows from `start` up to `end`."""
        pairs = [(row - start, token) for row, token in zip(*self.bans, strict=True) if start <= row < end]
        bans = [row for row, _ in pairs], [token for _, token in pairs]
        return Mask(self.may_end, self.forced[start:end], bans)


class LogProbs:
    """Log-softmax and masking in one reused buffer: a result is valid until the next call, and may be overwritten."""

    def __init__(self, symbols: Symbols, device: torch.device) -> None:
        assert symbols.eos not in symbols.banned
        self._eos = symbols.eos
        self._banned = torch.tensor(symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self._buffer = torch.empty(0, 0, device=device)

    def __call__(self, logits: Tensor, mask: Mask) -> Tensor:
        """(N, V) -> (N, V') float32, -inf for tokens that may not follow; V' is V padded with -inf to whole blocks.

        Masking does not renormalise.
        """
        rows, vocabulary = logits.shape
        if len(self._buffer) < rows:
            columns = -(-vocabulary // BLOCK) * BLOCK
            self._buffer = torch.full((rows, columns), -math.inf, device=logits.device)
        log_probs = self._buffer[:rows]
        torch.log_softmax(logits, -1, dtype=torch.float32, out=log_probs[:, :vocabulary])
        forced = [(row, token) for row, token in enumerate(mask.forced) if token is not None]
        index = torch.tensor(forced, dtype=torch.int64).view(-1, 2).to(log_probs.device, non_blocking=True).unbind(1)
        unmasked = log_probs[index] if forced else None
        log_probs.index_fill_(1, self._banned, -math.inf)
        if not mask.may_end:
            log_probs[:, self._eos].fill_(-math.inf)
        if mask.bans[0]:
            log_probs[torch.tensor(mask.bans).to(log_probs.device, non_blocking=True).unbind()] = -math.inf
        if unmasked is not None:
            log_probs.index_fill_(0, index[0], -math.inf)
            log_probs[index] = unmasked
        return log_probs


def pack_top(log_probs: Tensor, k: int, few: int = FEW) -> Tensor:
    """(B, M) float32, none positive -> (B, k) int64: the k best, best first; of equals, the lower position first.

    M must be a multiple of BLOCK. `unpack` separates values and positions. torch.topk leaves the order of equals open,
    and on some devices it depends on the shape, so that other sentences in the batch could change a translation. Equal
    scores are common: logits in bfloat16 have 8 significant bits.
    """
    rows, columns = log_probs.shape
    if rows * columns <= few:
        return _pack(log_probs, torch.arange(columns, device=log_probs.device)).topk(k, largest=False).values
    blocks = log_probs.view(rows, columns // BLOCK, BLOCK)
    # The k best elements lie in the k blocks with the greatest maxima: if k blocks rank before an element's own block,
    # k maxima rank before the element. Ranking the maxima leaves k * BLOCK of the M columns to rank.
    first = torch.arange(0, columns, BLOCK, device=log_probs.device)
    top = _pack(blocks.amax(-1), first).topk(min(k, len(first)), largest=False, sorted=False).values
    starts = top & _POSITIONS
    positions = (starts[:, :, None] + torch.arange(BLOCK, device=log_probs.device)).flatten(1)
    return _pack(log_probs.gather(1, positions), positions).topk(k, largest=False).values


def pack_at(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Pack the log-probabilities (B, M) at positions (B, X) as `pack_top` does."""
    return _pack(log_probs.gather(1, positions), positions)


def distinct(packed: Ids) -> Ids:
    """Sort packed numbers (B, X), best first, and replace repetitions by impossible ones."""
    packed = np.sort(packed, axis=1)
    packed[:, 1:][packed[:, 1:] == packed[:, :-1]] = _IMPOSSIBLE
    return np.sort(packed, axis=1)


def unpack(packed: Ids) -> tuple[NDArray[np.float32], Ids]:
    """Separate packed numbers of any shape into log-probabilities and positions."""
    return -(packed >> _POSITION_BITS).astype(np.int32).view(np.float32), packed & _POSITIONS


def _pack(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Combine each value and its position in one integer, ordered by value, then position: the smallest is the best."""
    # The bits of non-negative floats, read as integers, keep their order.
    return (log_probs.abs().view(torch.int32).long() << _POSITION_BITS) + positions


class Ending(NamedTuple):
    """A finished hypothesis in a `History`: step (from 0) and row at which eos was chosen."""

    step: int
    row: int
    log_prob: float
    score: float


class History(Follower):
    """Back-pointers: token, parent row, log-probability and attention of every row of every step.

    Adding a step costs the same however long the hypotheses are. `hypotheses` follows the pointers at the end.
    """

    def __init__(self, batch: SearchBatch[Any]) -> None:
        self._eos, self._shortlist = batch.symbols.eos, batch.shortlist
        self._tokens: list[Sequence[int]] = []
        self._parents: list[Sequence[int]] = []
        self._weights: list[Tensor] = []
        self._totals: list[Tensor] = []

    def add(self, totals: Tensor, weights: Tensor | None) -> None:
        """Record the current step: log-probabilities (N,) of the hypotheses before it, and its attention (N, S)."""
        self._totals.append(totals)
        if weights is not None:
            self._weights.append(weights)

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        self._parents.append(parents)
        self._tokens.append(tokens)

    def hypotheses(self, endings: list[list[Ending]]) -> list[list[Hypothesis]]:
        """Return the hypotheses of each sentence's endings, in the same order."""
        paths = [self._path(ending) for sentence in endings for ending in sentence]
        totals = [part.tolist() for part in _along(paths, self._totals)]
        weights = _along(paths, self._weights) if self._weights else [None] * len(paths)
        results = zip(paths, totals, weights, strict=True)
        return [[self._hypothesis(ending, *next(results)) for ending in sentence] for sentence in endings]

    def _path(self, ending: Ending) -> list[int]:
        """Find the hypothesis's row at each step, from step 0."""
        path = [ending.row]
        for parents in reversed(self._parents[: ending.step]):
            path.append(parents[path[-1]])
        return path[::-1]

    def _hypothesis(self, ending: Ending, path: list[int], totals: list[float], attention: Tensor | None) -> Hypothesis:
        # The input of step t + 1 is the token chosen at step t.
        tokens = [step[row] for step, row in zip(self._tokens, path[1:], strict=False)] + [self._eos]
        if self._shortlist is not None:
            tokens = [self._shortlist[token] for token in tokens]
        log_probs = [after - before for before, after in pairwise([*totals, ending.log_prob])]
        return Hypothesis(tokens, ending.score, ending.log_prob, attention, log_probs)


def _along(paths: list[list[int]], steps: list[Tensor]) -> list[Tensor]:
    """(N, ...) of each step -> (T, ...) along each path, float32, copied from the device in one transfer."""
    if not paths:
        return []
    offsets = list(accumulate((len(step) for step in steps), initial=0))
    index = [offset + row for path in paths for offset, row in zip(offsets, path, strict=False)]
    joined = torch.cat(steps)
    rows = joined[torch.tensor(index).to(joined.device, non_blocking=True)].float().cpu()
    return list(torch.split(rows, [len(path) for path in paths]))
