"""Extends the hypotheses of a beam by one token and finds the best extensions, step by step or as CUDA graphs.

A step of a small model launches dozens of kernels, which take less time than their launches, and then waits for the
best extensions. With `RecordedSteps` the device also chooses which hypotheses stay live, so that several steps can be
launched at once. `beam_search` follows their results on the CPU.

Shapes: A sentences, W live hypotheses of each (1 at first, then K), K beam size, C candidates of each sentence,
N = A * W rows of a step, S source positions, V vocabulary, V' the vocabulary padded to whole blocks.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nmt.model.seq2seq import StateT
from nmt.ops.trees import map_tensors
from nmt.system.cuda_graphs import reason_of
from nmt.system.machine import is_out_of_memory
from nmt.translate.search import BLOCK, Follower, Ids, LogProbs, Mask, SearchBatch, distinct, pack_top, unpack

if TYPE_CHECKING:
    from nmt.translate.beam import Selection

log = logging.getLogger(__name__)
T = TypeVar("T")

CACHED_NUMBERS = 2**20  # a CPU computes this many log-probabilities at a time: 4 MiB, which fit its cache
AHEAD = 8  # steps that are launched at once


class Candidates(NamedTuple):
    """Hypotheses extended by one token, best first: (A, C). Impossible candidates have the log-probability -inf."""

    log_probs: NDArray[np.float32]  # log-probability of the extended hypothesis
    rows: Ids  # row of the hypothesis before the extension
    tokens: Ids  # token that extends the hypothesis

    @classmethod
    def of(cls, packed: Ids, width: int, vocabulary: int) -> "Candidates":
        """Separate packed positions (A, C) among the W * V' extensions of each sentence."""
        log_probs, positions = (part.numpy() for part in unpack(torch.from_numpy(packed)))
        rows_of_sentence, tokens = np.divmod(positions, vocabulary)
        return cls(log_probs, rows_of_sentence + np.arange(0, len(packed) * width, width)[:, None], tokens)

    def at(self, *index: Any) -> "Candidates":  # noqa: ANN401
        """Index all fields."""
        return Candidates(self.log_probs[index], self.rows[index], self.tokens[index])


class Expanded(NamedTuple):
    """The result of one step."""

    candidates: Candidates
    totals: Tensor  # (N,) log-probability of each live hypothesis before the step
    weights: Tensor | None  # (N, S) attention weights of the step; None without attention


class Expansion(ABC):
    """The live hypotheses of a batch, which are extended step by step."""

    drops_ended = True  # can sentences be dropped when they have ended?

    @abstractmethod
    def expand(self, now: int, active: Sequence[int]) -> Expanded:
        """Compute step `now`, counted from 0, for these sentences of the batch."""

    @abstractmethod
    def follow(self, live: Candidates, remaining: Tensor | None) -> None:
        """Continue with the candidates (A, K).

        remaining: int64 (A,), the numbers of the sentences that remain; None if no sentence is dropped.
        """


class StepByStep(Expansion, Generic[StateT]):
    """Computes each step when it is needed."""

    def __init__(
        self, batch: SearchBatch[StateT], selection: "Selection", followers: Sequence[Follower], cached_numbers: int
    ) -> None:
        self._batch, self._selection, self._followers = batch, selection, followers
        self._cached_numbers, self._log_probs = cached_numbers, LogProbs(batch.symbols, batch.device)
        sentences = len(batch.limits.max_lengths)
        self._state, self._scores = batch.state, torch.zeros(sentences, 1, device=batch.device)
        self._tokens = torch.full((sentences,), batch.symbols.bos, device=batch.device)

    def expand(self, now: int, active: Sequence[int]) -> Expanded:
        output = self._batch.step(self._tokens, self._state)
        self._state = output.state
        mask = Mask.of(self._batch, now, active, self._scores.shape[1], self._followers)
        return Expanded(self._best(output.logits, mask), self._scores.flatten(), output.weights)

    def _best(self, logits: Tensor, mask: Mask) -> Candidates:
        """Find the best candidates of each sentence and those that the selection proposes: logits (N, V)."""
        (sentences, width), vocabulary, packed, more = self._scores.shape, 0, [], None
        on_cpu = logits.device.type == "cpu"
        chunk = max(1, self._cached_numbers // (width * logits.shape[1])) if on_cpu else sentences
        for start in range(0, sentences, chunk):
            part, rows = slice(start, start + chunk), slice(start * width, (start + chunk) * width)
            log_probs = self._log_probs(logits[rows], mask.part(rows.start, rows.stop))
            vocabulary = log_probs.shape[1]
            totals = log_probs.view(-1, width, vocabulary).add_(self._scores[part, :, None]).flatten(1)
            top = pack_top(totals, min(self._selection.candidates, totals.shape[1]))
            more = self._selection.propose(totals, part)
            packed.append(top if more is None else torch.cat([top, more], 1))
        # The only synchronisation of a step: operations on the few candidates run on the CPU.
        best = (packed[0] if len(packed) == 1 else torch.cat(packed)).cpu().numpy()
        return Candidates.of(best if more is None else distinct(best), width, vocabulary)

    def follow(self, live: Candidates, remaining: Tensor | None) -> None:
        device = self._batch.device
        parents = torch.from_numpy(live.rows.ravel()).to(device, non_blocking=True)
        self._state = self._state.branch(parents, remaining)
        self._tokens = torch.from_numpy(live.tokens.ravel()).to(device, non_blocking=True)
        self._scores = torch.from_numpy(live.log_probs).to(device, non_blocking=True)


class Recorder(Protocol):
    """Records work on a device; see nmt.system.cuda_graphs.CUDARecorder."""

    usable: bool

    def compute(self, work: Callable[[], T]) -> T: ...

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]: ...

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]: ...


class Beam(NamedTuple, Generic[StateT]):
    """The live hypotheses before a step, on the device."""

    state: StateT
    tokens: Tensor  # int64 (N,) the last token of each hypothesis
    scores: Tensor  # (A, W) log-probability of each hypothesis

    def tensors(self) -> list[Tensor]:
        """List the tensors, in an order that depends on the form of the state alone."""
        tensors: list[Tensor] = []
        map_tensors(lambda part: tensors.append(part) or part, self)  # type: ignore[func-returns-value]
        return tensors

    def form(self) -> list[tuple[torch.Size, torch.dtype]]:
        """List shape and type of each tensor."""
        return [(part.shape, part.dtype) for part in self.tensors()]

    def overwrite(self, other: "Beam[StateT]") -> None:
        """Copy the tensors of another beam of the same form into the tensors of this one."""
        for part, new in zip(self.tensors(), other.tensors(), strict=True):
            if part is not new:
                part.copy_(new)


class RecordedSteps(Expansion, Generic[StateT]):
    """Chooses on the device which hypotheses stay live, as `Selection` does, and launches AHEAD steps at once.

    The step is recorded anew for each batch, after the first steps. So batches need no padding, and the recording is
    freed with the batch. If a step cannot be recorded, its kernels are launched one by one. Sentences that have ended
    stay in the batch until all have ended.
    """

    drops_ended = False

    def __init__(self, batch: SearchBatch[StateT], beam_size: int, recorder: Recorder) -> None:
        self._sentences = len(batch.limits.max_lengths)
        self._scores = torch.zeros(self._sentences)  # (N,) on the CPU, as `follow` received them
        # The iterator refers to the steps, but they do not refer to it: the end of the search frees both at once.
        self._steps = _DeviceSteps(batch, beam_size, recorder)
        self._results = self._steps.run()

    def expand(self, now: int, active: Sequence[int]) -> Expanded:
        packed, weights = next(self._results)
        width = len(self._scores) // self._sentences
        return Expanded(Candidates.of(packed, width, self._steps.columns), self._scores, weights)

    def follow(self, live: Candidates, remaining: Tensor | None) -> None:
        """Keep the log-probabilities. The device has made the same choice."""
        assert remaining is None
        self._scores = torch.from_numpy(live.log_probs.ravel())


class _DeviceSteps(Generic[StateT]):
    """The steps of `RecordedSteps`, which the device computes ahead of the host."""

    def __init__(self, batch: SearchBatch[StateT], beam_size: int, recorder: Recorder) -> None:
        forced, device = torch.from_numpy(batch.limits.forced_tokens(batch.symbols.eos)), batch.device
        self._batch, self._beam_size, self._recorder = batch, beam_size, recorder
        self._sentences, self._count = len(batch.limits.max_lengths), len(forced)
        # On the device: the number of the next step, the tokens that must follow at each step, and the banned tokens.
        self._now = torch.zeros((), dtype=torch.int64, device=device)
        self._forced = forced.to(device, non_blocking=True)
        self._banned = torch.tensor(batch.symbols.banned, dtype=torch.int64).to(device, non_blocking=True)
        self.columns = 0  # V', known after the first step

    def run(self) -> Iterator[tuple[Ids, Tensor | None]]:
        """Compute all steps, and yield the packed candidates (A, C) and the attention weights (N, S) of each."""
        A, symbols, device = self._sentences, self._batch.symbols, self._batch.device
        tokens = torch.full((A,), symbols.bos, device=device)
        beam = Beam(self._batch.state, tokens, torch.zeros(A, 1, device=device))
        for now in range(self._count):
            before = beam
            packed, weights, beam = self._recorder.compute(partial(self._step, before))
            yield packed.cpu().numpy(), weights
            if before.form() == beam.form():  # the state of the first step has another form
                yield from self._run_recorded(beam, packed, weights, now + 1)
                return

    def _run_recorded(
        self, beam: Beam[StateT], packed: Tensor, weights: Tensor | None, first: int
    ) -> Iterator[tuple[Ids, Tensor | None]]:
        """Record the step, and launch it for all steps from `first` on. packed, weights: those of the step before."""
        count = self._count - first
        all_packed = packed.new_empty(count, *packed.shape)
        all_weights = None if weights is None else weights.new_empty(count, *weights.shape)

        def advance() -> None:
            index = (self._now - first).view(1)
            packed, weights, after = self._step(beam)
            all_packed.index_copy_(0, index, packed[None])
            if all_weights is not None and weights is not None:
                all_weights.index_copy_(0, index, weights[None])
            beam.overwrite(after)

        launch = self._record(advance)
        running: tuple[int, Callable[[], Tensor]] | None = None
        for start in range(0, count, AHEAD):
            part = slice(start, min(start + AHEAD, count))
            for _ in range(start, part.stop):
                launch()
            launched = start, self._recorder.to_host(all_packed[part])
            # The host follows the steps launched before, while the device computes these.
            if running is not None:
                yield from _results(*running, all_weights)
            running = launched
        if running is not None:
            yield from _results(*running, all_weights)

    def _record(self, advance: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches the recorded step, or computes it if it cannot be recorded."""
        try:
            return self._recorder.record(advance)[1]
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._recorder.usable = False
            log.warning("beam search runs without CUDA graphs (search.cuda_graphs): %s", reason_of(error))
            return advance

    def _step(self, beam: Beam[StateT]) -> tuple[Tensor, Tensor | None, Beam[StateT]]:
        """Compute a step without waiting for the device -> packed candidates (A, C), weights (N, S), the next beam."""
        output = self._batch.step(beam.tokens, beam.state)
        (A, W), K, eos = beam.scores.shape, self._beam_size, self._batch.symbols.eos
        log_probs = self._log_probs(output.logits, W)
        self.columns = log_probs.shape[1]
        totals = (log_probs.view(A, W, -1) + beam.scores[:, :, None]).flatten(1)
        packed = pack_top(totals, min(2 * K, totals.shape[1]))
        values, positions = unpack(packed)
        # As in `Selection.choose`: the best candidates without eos stay live.
        ends = positions % self.columns == eos
        order = torch.arange(packed.shape[1], device=packed.device) + ends * packed.shape[1]
        order = order.topk(min(K, packed.shape[1]), largest=False).indices
        scores = values.masked_fill(ends, -math.inf).gather(1, order)
        positions = positions.gather(1, order)
        rows = positions // self.columns + torch.arange(0, A * W, W, device=packed.device)[:, None]
        tokens = (positions % self.columns).masked_fill(scores == -math.inf, eos)
        state = output.state.branch(rows.flatten(), None)
        self._now += 1
        return packed, output.weights, Beam(state, tokens.flatten(), scores)

    def _log_probs(self, logits: Tensor, width: int) -> Tensor:
        """Compute log-probabilities, -inf for tokens that may not follow: logits (N, V) -> (N, V') float32."""
        columns = torch.arange(logits.shape[1], device=logits.device)
        eos, limits = self._batch.symbols.eos, self._batch.limits
        may_follow = (columns != eos) | (self._now >= limits.min_length)
        may_follow = may_follow.index_fill(0, self._banned, False)
        forced = self._forced.index_select(0, self._now.view(1))[0].repeat_interleave(width)[:, None]
        may_follow = torch.where(forced < 0, may_follow, columns == forced)
        log_probs = logits.log_softmax(-1, dtype=torch.float32).masked_fill(~may_follow, -math.inf)
        return F.pad(log_probs, (0, -len(columns) % BLOCK), value=-math.inf)


def _results(start: int, copied: Callable[[], Tensor], weights: Tensor | None) -> Iterator[tuple[Ids, Tensor | None]]:
    """Wait for the packed candidates of steps from `start` on, and yield them with each step's weights."""
    for step, packed in enumerate(copied().numpy(), start):
        yield packed, None if weights is None else weights[step]
