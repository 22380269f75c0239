"""Search over token ids: batches of sentences, threads, the model prepared for search.

Shapes: S source positions, T target positions.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from nmt.config import schema
from nmt.data.batching import padded
from nmt.data.tokenizer import Tokenizers
from nmt.machine import Machine, retry_in_halves
from nmt.model.ensemble import Ensemble, SearchEnsemble
from nmt.model.search_model import SearchModel, prepare_for_search
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.packed import pack, pack_int8
from nmt.ops.sentence_draws import sampling_draws, sentence_keys
from nmt.ops.shared import loop
from nmt.search.beam import beam_search
from nmt.search.hypothesis import NO_PENALTY, Hypothesis, LengthPenalty, Limits, Symbols
from nmt.search.rollout import SamplingOptions, greedy_search, sample
from nmt.search.shortlist import Shortlist

MIN_THREAD_TOKENS = 1024  # tokens x beam size; a smaller batch is not worth another thread


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
        self.model, self.tokenizers, self.settings = model, tokenizers, search
        self.machine, self.seed, self.shortlist = machine, seed, shortlist
        self._prepared: tuple[list[tuple[int, int]], SearchModel | SearchEnsemble] | None = None

    @property
    def beam_size(self) -> int:
        """Hypotheses of a sentence at each step."""
        return self.settings.beam_size if isinstance(self.settings, schema.Beam) else 1

    @property
    def penalty(self) -> LengthPenalty:
        """Of the settings."""
        if not isinstance(self.settings, schema.Beam):
            return NO_PENALTY
        return LengthPenalty(self.settings.length_penalty, self.settings.alpha)

    def workers(self) -> int:
        """Threads that each search a batch of their own. On a CPU this is faster than sharing small products."""
        if self.machine.device.type != "cpu":
            return 1
        return max(1, min(torch.get_num_threads(), self.settings.batch_tokens // MIN_THREAD_TOKENS))

    def batches(self, sources: Sequence[list[int]], with_empty: bool = False, workers: int = 1) -> Iterator[list[int]]:
        """Batches of indices, longest first for little padding; `workers` batches share search.batch_tokens.

        Sentences without tokens are left out unless `with_empty`.
        """
        order = [i for i in range(len(sources)) if with_empty or len(sources[i]) > 1]
        order.sort(key=lambda i: -len(sources[i]))
        budget = self.settings.batch_tokens // (self.beam_size * workers)
        start = 0
        while start < len(order):
            size = max(1, budget // len(sources[order[start]]))
            yield order[start : start + size]
            start += size

    def search(
        self, batches: Sequence[list[int]], sources: Sequence[list[int]], first: int, n: int
    ) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:
        """Batches of indices, each with the n best hypotheses of its sentences. `first`: the number of sentence 0, on
        which samples depend."""
        threads, workers = torch.get_num_threads(), self.workers()
        model = self._search_model()

        def search(batch: list[int]) -> list[list[Hypothesis]]:
            parts = retry_in_halves(lambda part: self._search_batch(model, part, sources, first, n), batch)
            return list(chain.from_iterable(parts))

        if workers == 1 or len(batches) == 1:
            torch.set_num_threads(self._threads(batches, sources, threads))
            try:
                yield from ((batch, search(batch)) for batch in batches)
            finally:
                torch.set_num_threads(threads)
            return
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,))
        try:
            yield from zip(batches, pool.map(search, batches), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # some libraries share one setting among all threads

    def _threads(self, batches: Sequence[list[int]], sources: Sequence[list[int]], most: int) -> int:
        """Threads for the products of one batch after the other: a few sentences are slower on several."""
        if self.machine.device.type != "cpu":
            return most
        longest = max((len(sources[i]) * len(batch) for batch in batches for i in batch), default=0)
        return max(1, min(most, longest * self.beam_size // MIN_THREAD_TOKENS))

    def forget(self) -> None:
        """Prepare the model again for the next search, as its weights may have changed: fused optimizers leave no
        trace."""
        self._prepared = None

    def _search_model(self) -> SearchModel | SearchEnsemble:
        """The model prepared for search, anew if its weights have visibly changed."""
        versions = [(weight.data_ptr(), weight._version) for weight in self.model.parameters()]
        versions.append((self.beam_size, 0))
        if self._prepared is None or self._prepared[0] != versions:
            packing = pack_int8 if self.machine.int8 else pack
            with self.machine.autocast():
                self._prepared = versions, prepare_for_search(self.model, self.beam_size, packing)
        return self._prepared[1]

    @torch.no_grad()
    def _search_batch(
        self,
        model: SearchModel | SearchEnsemble,
        batch: list[int],
        all_sources: Sequence[list[int]],
        first: int,
        n: int,
    ) -> list[list[Hypothesis]]:
        """Indices of sentences, the longest first, and token ids -> the n best hypotheses of each."""
        config, device = self.settings, self.machine.device
        sources = [all_sources[i] for i in batch]
        source = torch.from_numpy(padded(sources, self.tokenizers.source.pad)).to(device)
        lengths = torch.tensor([len(ids) for ids in sources])
        max_lengths = [min(config.max_length, int(config.max_ratio * len(ids)) + 10) for ids in sources]
        limits = Limits(max(0, config.min_length - 1), max_lengths)
        vocabulary = None if self.shortlist is None else self.shortlist.vocabulary(sources)
        symbols = self._symbols(vocabulary)
        with self.machine.autocast(), loop():  # so that what a score computes from the keys is kept between steps
            on_device = () if vocabulary is None else (torch.from_numpy(vocabulary).to(device),)
            state: Any = model.encode(source, lengths, *on_device)
            inputs: Any = model.step, state, symbols, limits
            match config:
                case schema.Greedy():
                    results = greedy_search(*inputs, penalty=self.penalty, device=device)
                case schema.Beam():
                    options: dict[str, Any] = {"beam_size": config.beam_size, "n_best": n, "stop": config.stop}
                    results = beam_search(*inputs, **options, penalty=self.penalty, device=device)
                case schema.Sampling():
                    sampling = SamplingOptions(config.temperature, config.top_k, config.top_p, n)
                    keys = sentence_keys((self.seed,), np.array(batch) + first)
                    draws = sampling_draws(keys, n, device)
                    results = sample(*inputs, options=sampling, uniform=draws, penalty=self.penalty, device=device)
        if vocabulary is None:
            return results
        tokens = vocabulary.tolist()
        return [
            [replace(hypothesis, tokens=[tokens[word] for word in hypothesis.tokens]) for hypothesis in nbest]
            for nbest in results
        ]

    def _symbols(self, vocabulary: "np.ndarray[Any, Any] | None") -> Symbols:
        """The special tokens, as positions in the vocabulary if there is one."""
        target = self.tokenizers.target
        ids = [target.bos, target.eos, target.pad]
        bos, eos, pad = ids if vocabulary is None else np.searchsorted(vocabulary, ids).tolist()
        return Symbols(bos, eos, banned=(pad, bos))
