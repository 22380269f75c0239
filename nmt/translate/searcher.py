"""Search over token ids: batches of sentences, threads, the model prepared for search.

Shapes: S source positions, T target positions.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.data.batching import padded
from nmt.data.tokenizer import Tokenizers
from nmt.model.ensemble import Ensemble, SearchEnsemble
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.sentence_draws import sentence_keys
from nmt.ops.shared import loop
from nmt.system.machine import Machine, retry_in_halves
from nmt.translate.guidance import Guidance
from nmt.translate.prepared_cache import PreparedModels
from nmt.translate.prepared_model import SearchModel
from nmt.translate.search.choice import beam_size, run_search, width
from nmt.translate.search.constrained import Allocation
from nmt.translate.search.forbidden import Forbidden
from nmt.translate.search.hypothesis import Hypothesis, Limits, Symbols
from nmt.translate.search.shortlist import Shortlist
from nmt.translate.search.tree import BeamTree, Node

EXTRA_TOKENS = 10  # of a translation, beyond search.max_ratio times the source's
MIN_THREAD_TOKENS = 1024  # tokens x beam size; a smaller batch is not worth another thread
UNGUIDED = Guidance()


class Searcher:
    """Searches translations of sentences given as token ids."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizers: Tokenizers,
        search: schema.Search,
        machine: Machine,
        seed: int,
        shortlist: Shortlist | None = None,
    ) -> None:
        self.model, self.tokenizers = model, tokenizers
        self.settings = self._checked(search)
        self.machine, self.seed = machine, seed
        self.shortlist = shortlist.with_sources() if shortlist is not None and model.has_copy_gate else shortlist
        self._prepared = PreparedModels(model, machine)

    def with_settings(self, settings: schema.Search) -> Self:
        """A search with other settings, which shares the prepared models. Raises UserError if the model lacks what they
        need."""
        other = copy(self)
        other.settings = self._checked(settings)
        return other

    def _checked(self, settings: schema.Search) -> schema.Search:
        if isinstance(settings, schema.Beam) and settings.coverage_penalty and not self.model.attends:
            raise UserError(
                f"search.coverage_penalty={settings.coverage_penalty}: the run has no attention; set it to 0"
            )
        return settings

    @property
    def beam_size(self) -> int:
        """Hypotheses of a sentence in a beam; 1 for other searches."""
        return beam_size(self.settings)

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
        """Batches of indices, longest first for little padding; `workers` batches share search.batch_tokens, in a
        search for the n best translations.

        Sentences without tokens are left out unless `with_empty`. Those with constraints have batches of their own.
        """
        order = [i for i in range(len(sources)) if with_empty or len(sources[i]) > 1]
        order.sort(key=lambda i: -len(sources[i]))
        constrained = [i for i in order if constraints and constraints[i]]
        budget = self.settings.batch_tokens // (width(self.settings, n) * workers)
        for group in (order if not constrained else [i for i in order if not constraints[i]], constrained):
            start = 0
            while start < len(group):
                size = max(1, budget // len(sources[group[start]]))
                yield group[start : start + size]
                start += size

    def search(
        self,
        batches: Sequence[list[int]],
        sources: Sequence[list[int]],
        first: int,
        n: int,
        guidance: Guidance = UNGUIDED,
    ) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:
        """Batches of indices, each with the n best hypotheses of its sentences, or all candidates of search=mbr.
        `first`: the number of sentence 0, on which samples depend."""
        threads, workers = torch.get_num_threads(), self.workers()
        model = self._prepared.get(self.beam_size)

        def search_batch(batch: list[int]) -> list[list[Hypothesis]]:
            def search_part(part: list[int]) -> list[list[Hypothesis]]:
                return self._search_batch(model, part, sources, first, n, guidance)

            return list(chain.from_iterable(retry_in_halves(search_part, batch)))

        if workers == 1 or len(batches) == 1:
            torch.set_num_threads(self._threads(batches, sources, n, threads))
            try:
                yield from ((batch, search_batch(batch)) for batch in batches)
            finally:
                torch.set_num_threads(threads)
            return
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
        try:
            yield from zip(batches, pool.map(search_batch, batches), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # some libraries share one setting among all threads

    def _threads(self, batches: Sequence[list[int]], sources: Sequence[list[int]], n: int, most: int) -> int:
        """Threads for the products of one batch after the other: a few sentences are slower on several."""
        if self.machine.device.type != "cpu":
            return most
        longest = max((len(sources[i]) * len(batch) for batch in batches for i in batch), default=0)
        return max(1, min(most, longest * width(self.settings, n) // MIN_THREAD_TOKENS))

    def invalidate_prepared(self) -> None:
        """Prepare the model again for the next search, as its weights may have changed: fused optimizers leave no
        trace."""
        self._prepared.clear()

    def tree(
        self, source: list[int], n: int, guidance: Guidance = UNGUIDED
    ) -> tuple[list[Hypothesis], list[list[Node]]]:
        """The n best hypotheses of one sentence, and the steps of their beam search. Raises UserError for another kind
        of search."""
        if not isinstance(self.settings, schema.Beam):
            raise UserError(f"a beam's tree needs search=beam, but this search is {self.settings.kind}")
        if self.settings.groups > 1:
            raise UserError(
                f"search.groups={self.settings.groups}: a tree shows one beam, not several; use search.groups=1"
            )
        tree = BeamTree()
        model = self._prepared.get(self.beam_size)
        (nbest,) = self._search_batch(model, [0], [source], 0, n, guidance, tree)
        return nbest, tree.steps

    @torch.no_grad()
    def _search_batch(
        self,
        model: SearchModel | SearchEnsemble,
        batch: list[int],
        all_sources: Sequence[list[int]],
        first: int,
        n: int,
        guidance: Guidance,
        tree: BeamTree | None = None,
    ) -> list[list[Hypothesis]]:
        """Indices of sentences, the longest first, and token ids -> the n best hypotheses of each."""
        device = self.machine.device
        sources = [all_sources[i] for i in batch]
        source = torch.from_numpy(padded(sources, self.tokenizers.source.pad)).to(device)
        lengths = [len(ids) for ids in sources]
        prefixes = [guidance.prefixes[i] for i in batch] if guidance.prefixes else []
        constraints = [guidance.constraints[i] for i in batch] if guidance.constraints else []
        forbidden, vocabulary = guidance.forbidden, None
        if self.shortlist is not None:
            also = chain(chain.from_iterable(prefixes), chain.from_iterable(chain.from_iterable(constraints)))
            vocabulary = self.shortlist.vocabulary(sources, list(also))
        if vocabulary is not None:
            prefixes = [_find(prefix, vocabulary) for prefix in prefixes]
            constraints = [[_find(phrase, vocabulary) for phrase in phrases] for phrases in constraints]
            forbidden = None if forbidden is None else forbidden.within(vocabulary)
        symbols = self._symbols(vocabulary, forbidden)
        limits = self._limits(lengths, prefixes)
        steering = guidance.steering(lengths, device)
        with self.machine.autocast(), loop():  # so that what a score computes from the keys is kept between steps
            on_device = () if vocabulary is None else (torch.from_numpy(vocabulary).to(device),)
            state: Any = model.encode(source, torch.tensor(lengths), *on_device)
            state = state if steering is None else state.steered(steering)
            allocation = None
            if any(constraints):
                boundary = self.boundary if vocabulary is None else self.boundary[vocabulary]
                allocation = Allocation(constraints, boundary, symbols.eos, self.beam_size)
            keys = sentence_keys((self.seed,), np.array(batch) + first)
            results = run_search(
                self.settings,
                (model.step, state, symbols, limits),
                n,
                lengths,
                keys,
                device,
                of_beams={"tree": tree, "allocation": allocation},
                forbidden=forbidden,
            )
        if vocabulary is None:
            return results
        tokens = vocabulary.tolist()
        if tree is not None:
            tree.steps = [[node._replace(token=tokens[node.token]) for node in step] for step in tree.steps]
        return [
            [replace(hypothesis, tokens=[tokens[word] for word in hypothesis.tokens]) for hypothesis in nbest]
            for nbest in results
        ]

    def limit(self, length: int) -> int:
        """The most tokens, with </s>, of the translation of this many source tokens."""
        return min(self.settings.max_length, int(self.settings.max_ratio * length) + EXTRA_TOKENS)

    def _limits(self, lengths: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Limits:
        """The limits of sentences with these numbers of source tokens."""
        most = [self.limit(length) for length in lengths]
        if prefixes:
            most = [max(length, len(prefix) + 1) for length, prefix in zip(most, prefixes, strict=True)]
        return Limits(max(0, self.settings.min_length - 1), most, prefixes)

    @cached_property
    def boundary(self) -> NDArray[np.bool_]:
        """See `Tokenizer.boundary`, of target tokens."""
        return self.tokenizers.target.boundary()

    def _symbols(self, vocabulary: NDArray[np.int64] | None, forbidden: Forbidden | None) -> Symbols:
        """The special tokens, as positions in the vocabulary if there is one."""
        target = self.tokenizers.target
        ids, tags = [target.bos, target.eos, target.pad], target.tag_ids
        bos, eos, pad = ids if vocabulary is None else _find(ids, vocabulary)
        if vocabulary is not None and tags:
            tags = np.flatnonzero(np.isin(vocabulary, tags)).tolist()
        return Symbols(bos, eos, banned=(pad, bos, *tags, *(() if forbidden is None else forbidden.always)))


def _find(tokens: Sequence[int], vocabulary: NDArray[np.int64]) -> list[int]:
    """The positions of tokens in an ascending vocabulary that holds them."""
    positions: list[int] = np.searchsorted(vocabulary, tokens).tolist()
    return positions
