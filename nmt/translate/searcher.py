"""Search over token ids: batches of sentences, threads, the model prepared for search.

Shapes: S source positions, T target positions, V target vocabulary, L tokens of a shortlist.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, assert_never

import numpy as np
import torch

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.batching import padded
from nmt.data.tokenizer import Tokenizers
from nmt.model.ensemble import Ensemble
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.draws import sentence_keys
from nmt.ops.shared import loop
from nmt.system.machine import Machine, retry_in_halves
from nmt.translate.beam import BeamSearch, Node
from nmt.translate.guidance import Guidance
from nmt.translate.phrases import Allocation, Watch
from nmt.translate.prepared_model import PreparedModels
from nmt.translate.sampling import GreedySearch, MinimumBayesRisk, Sampling
from nmt.translate.search import Flags, Hypothesis, Ids, Limits, Search, SearchBatch, Symbols

if TYPE_CHECKING:
    from nmt.translate.shortlist import Shortlist

EXTRA_TOKENS = 10  # of a translation, beyond search.max_ratio times the source's
MIN_THREAD_TOKENS = 1024  # tokens x beam size; a smaller batch is not worth another thread


def make_search(settings: schema.Search) -> Search[Any]:
    """Build the search of a section of the configuration."""
    match settings:
        case schema.Beam():
            return BeamSearch(settings)
        case schema.Greedy():
            return GreedySearch(settings)
        case schema.Sampling():
            return Sampling(settings)
        case schema.MinimumBayesRisk():
            return MinimumBayesRisk(settings)
    assert_never(settings)


class Searcher:
    """Searches translations of sentences given as token ids."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizers: Tokenizers,
        settings: schema.Search,
        machine: Machine,
        seed: int,
        shortlist: "Shortlist | None" = None,
    ) -> None:
        self.model, self.tokenizers = model, tokenizers
        self.machine, self.seed = machine, seed
        self.shortlist = shortlist.with_sources() if shortlist is not None and model.has_copy_gate else shortlist
        self._prepared = PreparedModels(model, machine)
        self._set(settings)

    def _set(self, settings: schema.Search) -> None:
        penalty = getattr(settings, "coverage_penalty", 0)
        if penalty and not self.model.attends:
            raise UserError(f"search.coverage_penalty={penalty}: the run has no attention; set it to 0")
        self.settings, self.method = settings, make_search(settings)

    def with_settings(self, settings: schema.Search) -> Self:
        """Return a searcher with other settings, which shares the prepared models. Raises UserError if the model lacks
        what they need."""
        other = copy(self)
        other._set(settings)
        return other

    @property
    def beam_size(self) -> int:
        """Hypotheses of a sentence in a beam; 1 for other searches."""
        return self.method.beam_size

    def limit(self, length: int) -> int:
        """The most tokens, with </s>, of the translation of this many source tokens."""
        return min(self.settings.max_length, int(self.settings.max_ratio * length) + EXTRA_TOKENS)

    @cached_property
    def boundary(self) -> Flags:
        """See `Tokenizer.boundary`, of target tokens."""
        return self.tokenizers.target.boundary()

    def workers(self) -> int:
        """Threads that each search a batch of their own. On a CPU this is faster than sharing small products."""
        if self.machine.device.type != "cpu":
            return 1
        return max(1, min(torch.get_num_threads(), self.settings.batch_tokens // MIN_THREAD_TOKENS))

    def batches(
        self,
        sources: Sequence[list[int]],
        with_empty: bool = False,
        workers: int = 1,
        constraints: Sequence[Sequence[Sequence[int]]] = (),
        n: int = 1,
    ) -> Iterator[list[int]]:
        """Divide sentences into batches of indices, longest first for little padding; `workers` batches share
        search.batch_tokens, in a search for the n best translations.

        Sentences without tokens are left out unless `with_empty`. Those with constraints have batches of their own.
        """
        order = [i for i in range(len(sources)) if with_empty or len(sources[i]) > 1]
        order.sort(key=lambda i: -len(sources[i]))
        constrained = [i for i in order if constraints and constraints[i]]
        budget = self.settings.batch_tokens // (self.method.width(n) * workers)
        for group in (order if not constrained else [i for i in order if not constraints[i]], constrained):
            start = 0
            while start < len(group):
                size = max(1, budget // len(sources[group[start]]))
                yield group[start : start + size]
                start += size

    def search(
        self, batches: Sequence[list[int]], sources: Sequence[list[int]], first: int, n: int, guidance: Guidance
    ) -> Iterator[list[list[Hypothesis]]]:
        """Search each batch of indices, for the hypotheses of its sentences as `Search.__call__` returns them.

        first: the number of sentence 0, on which samples depend.
        """
        threads, workers = torch.get_num_threads(), self.workers()

        def search_part(indices: list[int]) -> list[list[Hypothesis]]:
            with self._batch(indices, sources, first, guidance) as batch:
                return self.method(batch, n)

        def search_batch(indices: list[int]) -> list[list[Hypothesis]]:
            return list(chain.from_iterable(retry_in_halves(search_part, indices)))

        if workers == 1 or len(batches) == 1:
            torch.set_num_threads(self._threads(batches, sources, n, threads))
            try:
                yield from map(search_batch, batches)
            finally:
                torch.set_num_threads(threads)
            return
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
        try:
            yield from pool.map(search_batch, batches)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # some libraries share one setting among all threads

    def _threads(self, batches: Sequence[list[int]], sources: Sequence[list[int]], n: int, most: int) -> int:
        """Threads for the products of one batch after the other: a few sentences are slower on several."""
        if self.machine.device.type != "cpu":
            return most
        longest = max((len(sources[i]) * len(batch) for batch in batches for i in batch), default=0)
        return max(1, min(most, longest * self.method.width(n) // MIN_THREAD_TOKENS))

    def tree(self, source: list[int], n: int, guidance: Guidance) -> tuple[list[Hypothesis], list[list[Node]]]:
        """Return the n best hypotheses of one sentence and the steps of their beam search. Raises UserError if there is
        no beam."""
        with self._batch([0], [source], 0, guidance) as batch:
            (nbest,), steps = self.method.tree(batch, n)
        return nbest, steps

    def invalidate_prepared(self) -> None:
        """Prepare the model again for the next search, as its weights may have changed: fused optimizers leave no
        trace."""
        self._prepared.clear()

    @contextmanager
    def _batch(
        self, indices: Sequence[int], all_sources: Sequence[list[int]], first: int, guidance: Guidance
    ) -> Iterator[SearchBatch[Any]]:
        """Encode the sentences of these indices, the longest first, to be searched within this context."""
        model, device, target = self._prepared.get(self.beam_size), self.machine.device, self.tokenizers.target
        sources = [all_sources[i] for i in indices]
        lengths = [len(ids) for ids in sources]
        guidance, shortlist = guidance.of(indices), None
        if self.shortlist is not None:
            shortlist = self.shortlist.vocabulary(sources, guidance.tokens())
        symbols = Symbols(target.bos, target.eos, (target.pad, target.bos))
        if shortlist is not None:
            guidance, symbols = guidance.within(shortlist), _within(symbols, shortlist)
        selection = None
        if any(guidance.constraints):
            boundary = self.boundary if shortlist is None else self.boundary[shortlist]
            selection = partial(Allocation, constraints=guidance.constraints, boundary=boundary)
        forbidden = guidance.forbidden
        if forbidden is not None:
            symbols = symbols._replace(banned=(*symbols.banned, *forbidden.always))
        with torch.no_grad(), self.machine.autocast(), loop():  # scores keep what they compute from the keys
            source = torch.from_numpy(padded(sources, self.tokenizers.source.pad)).to(device)
            vocabulary = () if shortlist is None else (torch.from_numpy(shortlist).to(device),)
            state: Any = model.encode(source, torch.tensor(lengths), *vocabulary)
            steering = guidance.steering(lengths, device)
            yield SearchBatch(
                model.step,
                state if steering is None else state.steered(steering),
                symbols,
                self._limits(lengths, guidance.prefixes),
                device,
                lengths,
                sentence_keys((self.seed,), np.array(indices) + first),
                () if forbidden is None else (partial(Watch, forbidden),),
                selection,
                None if shortlist is None else shortlist.tolist(),
            )

    def _limits(self, lengths: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Limits:
        """The limits of sentences with these numbers of source tokens."""
        most = [self.limit(length) for length in lengths]
        if prefixes:
            most = [max(length, len(prefix) + 1) for length, prefix in zip(most, prefixes, strict=True)]
        return Limits(max(0, self.settings.min_length - 1), most, prefixes)


def _within(symbols: Symbols, shortlist: Ids) -> Symbols:
    """The positions of special tokens in a shortlist."""
    bos, eos = np.searchsorted(shortlist, (symbols.bos, symbols.eos)).tolist()
    return Symbols(bos, eos, tuple(np.flatnonzero(np.isin(shortlist, symbols.banned)).tolist()))
