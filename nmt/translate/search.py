"""What all search methods share: their interface, the batch they search, log-probabilities of the next token, and
back-pointers.

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
from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.model.seq2seq import StateT, Step

if TYPE_CHECKING:
    from nmt.translate.beam import Node, Selection
    from nmt.translate.expansion import Recorder
    from nmt.translate.phrases import Forbidden
    from nmt.translate.translator import Translation

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bans = tuple[list[int], list[int]]
"""Rows and as many tokens: tokens[i] may not follow the hypothesis in row rows[i]. A row may occur several times."""

Attend = Mapping[int, int | Sequence[float]]
"""Step -> the source position that has attention weight 1, or the weights of all positions. Both count from 0."""

BLOCK = 64  # columns of a block in `pack_top`
FEW = 2**14  # `pack_top` ranks up to this many numbers without blocks
_POSITION_BITS = 32
_POSITIONS = 2**_POSITION_BITS - 1
_IMPOSSIBLE = np.int64(np.float32(math.inf).view(np.int32)) << _POSITION_BITS


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


@dataclass(frozen=True)
class Limits:
    """Limits on the hypotheses of each sentence b: they start with the tokens `prefixes[b]`, and have at least
    `min_length` tokens before eos and at most `max_lengths[b]` tokens including eos.

    Where limits conflict, the prefix has precedence over the maximum, and the maximum over the minimum.
    """

    min_length: int
    max_lengths: list[int]  # each at least 1, and greater than the length of the prefix
    prefixes: Sequence[Sequence[int]] = ()  # empty, or one for each sentence

    def forced_tokens(self, eos: int) -> Ids:
        """Make a table (T, B) of the tokens that must follow at each step, -1 where several may."""
        steps = np.arange(max(self.max_lengths, default=0))[:, None]
        table = np.where(steps + 1 >= self.max_lengths, eos, -1)
        for sentence, prefix in enumerate(self.prefixes):
            table[: len(prefix), sentence] = prefix
        return table

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
    forbidden: "Forbidden | None" = None

    def of(self, indices: Sequence[int]) -> "Guidance":
        """Select the guidance of the sentences with these indices."""
        return self._replace(
            prefixes=[self.prefixes[i] for i in indices] if self.prefixes else (),
            constraints=[self.constraints[i] for i in indices] if self.constraints else (),
        )

    def tokens(self) -> list[int]:
        """List all tokens of prefixes and constraints."""
        return [*chain.from_iterable(self.prefixes), *chain.from_iterable(chain.from_iterable(self.constraints))]

    def within(self, shortlist: Ids) -> "Guidance":
        """Replace each token by its position in a shortlist. The shortlist must contain all of `tokens()`."""

        def positions(tokens: Sequence[int]) -> list[int]:
            return [int(position) for position in np.searchsorted(shortlist, tokens)]

        return self._replace(
            prefixes=[positions(prefix) for prefix in self.prefixes],
            constraints=[[positions(phrase) for phrase in phrases] for phrases in self.constraints],
            forbidden=None if self.forbidden is None else self.forbidden.within(shortlist),
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


class Follower:
    """Keeps something for each live hypothesis (row) of a search, and is told at each step which row extends which."""

    def bans(self) -> Bans:
        """Return which tokens may not follow at the next step, such as the last token of a forbidden phrase."""
        return [], []

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Continue with the rows of the next step: new row i extends row parents[i] by tokens[i]."""


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
    rules: Sequence[Callable[[int], Follower]] = ()  # number of rows at the first step -> a follower that bans tokens
    selection: "Callable[[int, int], Selection] | None" = None  # beam size, eos -> Allocation; None without constraints
    shortlist: Sequence[int] | None = None  # token id at each position; None without a shortlist
    recorder: "Recorder | None" = None  # records the steps on a GPU; None if they cannot be recorded

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


SettingsT = TypeVar("SettingsT", bound=schema.Search)


class Search(ABC, Generic[SettingsT]):
    """A search method, with its settings from the configuration."""

    beam_size = 1  # number of hypotheses of a sentence that share its memory at each step
    takes_constraints = False  # whether it uses `SearchBatch.selection`, which meets constraints

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

    def best(self, candidates: "list[Translation]", n: int) -> "list[Translation]":
        """Choose the n best translations of a sentence. `__call__` has returned the candidates in this order."""
        return candidates

    def tree(self, batch: SearchBatch[Any], n: int) -> "tuple[list[list[Hypothesis]], list[list[Node]]]":
        """Search a batch of one sentence, and return the candidates of each step too. Raises UserError if the search
        method has no beam."""
        raise UserError(f"a beam's tree needs search=beam, but this search is {self.settings.kind}")


class Mask(NamedTuple):
    """The tokens that may follow each of N hypotheses at one step."""

    may_end: bool  # whether hypotheses have the minimum length, so that eos may follow
    forced: list[int | None]  # the token that must follow each row, even if it is banned; None where several may
    bans: Bans

    @classmethod
    def of(
        cls, batch: SearchBatch[Any], step: int, sentences: Sequence[int], width: int, followers: Sequence[Follower]
    ) -> "Mask":
        """Make the mask of a step, counted from 0, for `width` hypotheses of each of these sentences."""
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
    """Computes masked log-probabilities in one reused buffer: a result is valid until the next call, and the caller may
    overwrite it."""

    def __init__(self, symbols: Symbols, device: torch.device) -> None:
        assert symbols.eos not in symbols.banned
        self._eos = symbols.eos
        self._banned = torch.tensor(symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self._buffer = torch.empty(0, 0, device=device)

    def __call__(self, logits: Tensor, mask: Mask) -> Tensor:
        """Compute log-probabilities, -inf for tokens that may not follow: logits (N, V) -> (N, V') float32.

        V' is V padded with -inf to whole blocks of BLOCK tokens. Masking does not renormalise the other tokens.
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
    """Find the k best values of each row, best first, packed with their positions: (B, M) float32 -> (B, k) int64.

    No value may be positive, and M must be a multiple of BLOCK. Of equal values, the one at the lower position comes
    first. torch.topk leaves the order of equal values open, and on some devices it depends on the shape, so that other
    sentences in the batch could change a translation. Equal values are common, as logits in bfloat16 have 8 significant
    bits. `unpack` separates values and positions.
    """
    rows, columns = log_probs.shape
    if rows * columns <= few:
        return _pack(log_probs, torch.arange(columns, device=log_probs.device)).topk(k, largest=False).values
    blocks = log_probs.view(rows, columns // BLOCK, BLOCK)
    # The k best elements lie in the k blocks with the greatest maxima: if k other blocks rank before an element's
    # block, their k maxima rank before the element. So it suffices to rank the k * BLOCK elements of these blocks.
    first = torch.arange(0, columns, BLOCK, device=log_probs.device)
    top = _pack(blocks.amax(-1), first).topk(min(k, len(first)), largest=False, sorted=False).values
    starts = top & _POSITIONS
    positions = (starts[:, :, None] + torch.arange(BLOCK, device=log_probs.device)).flatten(1)
    return _pack(log_probs.gather(1, positions), positions).topk(k, largest=False).values


def pack_at(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Pack log-probabilities with their positions, as `pack_top` does: (B, M), positions (B, X) -> (B, X) int64."""
    return _pack(log_probs.gather(1, positions), positions)


def distinct(packed: Ids) -> Ids:
    """Sort packed numbers (B, X), best first, and replace repetitions by -inf, which comes last."""
    packed = np.sort(packed, axis=1)
    packed[:, 1:][packed[:, 1:] == packed[:, :-1]] = _IMPOSSIBLE
    return np.sort(packed, axis=1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Separate packed numbers of any shape into log-probabilities and positions."""
    return -(packed >> _POSITION_BITS).int().view(torch.float32), packed & _POSITIONS


def _pack(log_probs: Tensor, positions: Tensor) -> Tensor:
    """Combine each value and its position in one integer. A smaller integer means a greater value, or an equal value at
    a lower position."""
    # Non-negative floats have the same order as their bits, read as integers.
    return (log_probs.abs().view(torch.int32).long() << _POSITION_BITS) + positions


class Ending(NamedTuple):
    """A finished hypothesis in a `History`. Eos was chosen at this step, counted from 0, in this row."""

    step: int
    row: int
    log_prob: float
    score: float


class History(Follower):
    """Back-pointers: records token, parent row, log-probability and attention of every row at every step.

    The cost of a step does not depend on the length of the hypotheses. After the search, `hypotheses` follows the
    pointers.
    """

    def __init__(self, batch: SearchBatch[Any]) -> None:
        self._eos, self._shortlist = batch.symbols.eos, batch.shortlist
        self._tokens: list[Sequence[int]] = []
        self._parents: list[Sequence[int]] = []
        self._weights: list[Tensor] = []
        self._totals: list[Tensor] = []

    def add(self, totals: Tensor, weights: Tensor | None) -> None:
        """Record the current step: the log-probabilities (N,) of the hypotheses before their tokens of this step, and
        the attention weights (N, S) of this step."""
        self._totals.append(totals)
        if weights is not None:
            self._weights.append(weights)

    def advance(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        self._parents.append(parents)
        self._tokens.append(tokens)

    def hypotheses(self, endings: list[list[Ending]]) -> list[list[Hypothesis]]:
        """Return a hypothesis for each ending of each sentence, in the same order."""
        paths = [self._path(ending) for sentence in endings for ending in sentence]
        totals = [part.tolist() for part in _along(paths, self._totals)]
        weights = _along(paths, self._weights) if self._weights else [None] * len(paths)
        results = zip(paths, totals, weights, strict=True)
        return [[self._hypothesis(ending, *next(results)) for ending in sentence] for sentence in endings]

    def _path(self, ending: Ending) -> list[int]:
        """Find the row of a finished hypothesis at each step, from step 0 to the last."""
        path = [ending.row]
        for parents in reversed(self._parents[: ending.step]):
            path.append(parents[path[-1]])
        return path[::-1]

    def _hypothesis(self, ending: Ending, path: list[int], totals: list[float], attention: Tensor | None) -> Hypothesis:
        # self._tokens[t] has the tokens chosen at step t, in the order of the rows of step t + 1.
        tokens = [step[row] for step, row in zip(self._tokens, path[1:], strict=False)] + [self._eos]
        if self._shortlist is not None:
            tokens = [self._shortlist[token] for token in tokens]
        log_probs = [after - before for before, after in pairwise([*totals, ending.log_prob])]
        return Hypothesis(tokens, ending.score, ending.log_prob, attention, log_probs)


def _along(paths: list[list[int]], steps: list[Tensor]) -> list[Tensor]:
    """Collect the rows of each path: (N, ...) of every step -> (T, ...) float32 on the CPU for every path.

    All rows are copied from the device in one transfer.
    """
    if not paths:
        return []
    offsets = list(accumulate((len(step) for step in steps), initial=0))
    index = [offset + row for path in paths for offset, row in zip(offsets, path, strict=False)]
    joined = torch.cat(steps)
    rows = joined[torch.tensor(index).to(joined.device, non_blocking=True)].float().cpu()
    return list(torch.split(rows, [len(path) for path in paths]))
