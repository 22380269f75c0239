"""The Python API: `Translator.load(run).translate(["..."])` translates lines, `Translator.load([run, run])` loads an
ensemble.

A translator encodes the lines, divides them into batches of sentences of similar length, searches each batch with the
search model, and decodes the hypotheses. Shapes: S source positions, T target positions, V target vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from nmt.config.checks import validated
from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.config.schema.commands import Loading
from nmt.data.batching import collate
from nmt.data.tokenizer import Tokenizers, copy_unknown, encode_lines
from nmt.model.checkpoints import load_runs
from nmt.model.seq2seq import Ensemble, Seq2Seq
from nmt.ops.draws import sentence_keys
from nmt.system.distributed import ProcessGroup
from nmt.system.machine import Machine, retry_in_halves
from nmt.system.run import RunDirectory, load_config
from nmt.translate.beam import BeamSearch
from nmt.translate.guidance import Controls, Guide
from nmt.translate.sampling import make_search
from nmt.translate.search import (
    NO_GUIDANCE,
    Attend,
    Guidance,
    Hypothesis,
    Limits,
    SearchBatch,
    Symbols,
    merge_search,
)
from nmt.translate.search_model import SearchModels
from nmt.translate.selection import Node
from nmt.translate.translation import Translation

if TYPE_CHECKING:
    from nmt.translate.shortlist import Shortlist

MIN_THREAD_TOKENS = 1024  # least work of a thread, in source tokens x hypotheses per sentence: less does not pay
T = TypeVar("T")

Progress = Callable[[int], object]  # called with the number of sentences just finished


class Translator:
    """A trained model or an ensemble, with its tokenizers and search settings."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizers: Tokenizers,
        settings: schema.Search,
        machine: Machine,
        seed: int = 1,
        group: ProcessGroup | None = None,
        shortlist: "Shortlist | None" = None,
    ) -> None:
        """group: the processes that translate the same lines and share the work, by default only this process."""
        self.model, self.tokenizers, self.machine, self.seed = model, tokenizers, machine, seed
        self.group, self.shortlist = group or ProcessGroup(), shortlist
        self._search_models = SearchModels(model, machine)
        self.use_search(settings)
        self.reseed()

    @classmethod
    def load(
        cls,
        run: str | Path | Sequence[str | Path],
        *,
        checkpoint: str = "best",
        search: Mapping[str, Any] | None = None,
        device: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
        seed: int | None = None,
        group: ProcessGroup | None = None,
        shortlist: str | None = None,
    ) -> Self:
        """Load the model of one run, or the ensemble of several runs. If device, precision, threads or seed is None,
        the first run's setting is used.

        `search` contains search settings that replace those of the first run, such as {"beam_size": 10} or {"kind":
        "greedy"}. shortlist: "auto" or a file, see nmt.translate.shortlist; by default, a search may use the whole
        vocabulary. Raises UserError if a run cannot be loaded or if the runs have different tokenizers.
        """
        directories = [RunDirectory.existing(path) for path in ([run] if isinstance(run, str | Path) else run)]
        if not directories:
            raise UserError("run=[]: needs one run or several")
        configs = [load_config(directory.config) for directory in directories]
        config = configs[0]
        values = {"checkpoint": checkpoint, "device": device, "precision": precision, "threads": threads, "seed": seed}
        validated(Loading, {**values, "shortlist": shortlist, "search": {} if search is None else search})
        machine = Machine.choose(device or config.device, precision or config.precision, threads or config.threads)
        model, tokenizers = load_runs(directories, configs, checkpoint)
        settings = merge_search(config.search, search or {})
        seed = config.seed if seed is None else seed
        model = model.to(machine.device).eval()
        words = None
        if shortlist is not None:
            from nmt.translate.shortlist import load_or_make_shortlist  # its corpora take 0.1 s to import

            words = load_or_make_shortlist(shortlist, directories[0], config)
        return cls(model, tokenizers, settings, machine, seed, group, words)

    @property
    def single(self) -> Seq2Seq:
        """Return the only model of a translator that is no ensemble."""
        (model,) = self.model.models
        return model

    def use_search(self, settings: schema.Search) -> None:
        """Search with these settings from now on. Raises UserError if they need an attention that the model lacks."""
        penalty = getattr(settings, "coverage_penalty", 0)
        if penalty and not self.model.attends:
            raise UserError(f"search.coverage_penalty={penalty}: the run has no attention; set it to 0")
        self.settings, self.method = settings, make_search(settings)
        self.guide = Guide(self.tokenizers, self.method, self.model.attends)

    def with_search(self, settings: schema.Search) -> Self:
        """Return a copy of this translator with other search settings. The copy shares the model."""
        other = copy(self)
        other.use_search(settings)
        return other

    def reseed(self) -> None:
        """Reset the count of translated lines to 0. Sampled translations depend on this count and on the seed."""
        self._translated, self._counting = 0, Lock()

    def translate(self, lines: Sequence[str], **controls: Unpack[Controls]) -> list[Translation]:
        """Return the best translation of each line. controls: see `translate_nbest`."""
        return [nbest[0] for nbest in self.translate_nbest(lines, 1, **controls)]

    def translate_nbest(
        self,
        lines: Sequence[str],
        n: int,
        progress: Progress | None = None,
        first_line: int = 1,
        **controls: Unpack[Controls],
    ) -> list[list[Translation]]:
        """Return up to n translations of each line, best first. Line numbers in warnings start at `first_line`.

        controls: `attend`, `prefix`, `prefixes`, `constraints`, `glossary`, `forbidden`, see
        nmt.translate.guidance.Controls. The translation of a line is empty if the line is empty, or if no hypothesis
        has a probability above 0. Raises UserError if the search cannot return n translations or follow the controls.
        """
        if n < 1:
            raise UserError(f"nbest={n}: less than one translation of each line")
        # `_shared` gives this process its batches, `_search_batches` halves a batch that does not fit in memory,
        # `_encoded_batch` encodes one, and `self.method` searches it.
        self.method.check_nbest(n)
        if self.model.training:
            self.discard_search_models()
        sources, pieces = self.encode(lines, first_line)
        with self._counting:
            first, self._translated = self._translated, self._translated + len(lines)
        guidance = self.guide.make(lines, sources, controls, first_line) if controls else NO_GUIDANCE
        batches = list(self.batches(sources, workers=self._workers(), constraints=guidance.constraints, n=n))

        def translate_batches(batches: Sequence[list[int]]) -> Iterator[list[list[Translation]]]:
            found = self._search_batches(batches, sources, first, n, guidance)
            for batch, nbests in zip(batches, found, strict=True):
                yield [
                    self.method.best([self.translation(pieces[i], hypothesis) for hypothesis in nbest], n)
                    for i, nbest in zip(batch, nbests, strict=True)
                ]

        results = self._shared(batches, translate_batches, progress)
        empty = Translation("", 0.0, 0.0, ["</s>"], ["</s>"], None, [0.0], ["</s>"])
        nbests = [results.get(i) or [empty] for i in range(len(lines))]
        if guidance.constraints:
            self.guide.warn_of_unmet(guidance, [nbest[0].tokens for nbest in nbests], first_line)
        return nbests

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        first_line: int = 1,
        progress: Progress | None = None,
        *,
        attend: Attend | None = None,
    ) -> list[Translation]:
        """Compute the score, log-probability and attention of existing translations by forced decoding.

        Sources and targets are truncated to search.max_source_length tokens. Line numbers in warnings start at
        `first_line`. attend: see nmt.translate.guidance.Controls.
        """
        if len(sources) != len(targets):
            raise UserError(f"sources: {len(sources)}, translations: {len(targets)}; give one of each source")
        source_ids, source_pieces = self.encode(sources, first_line)
        limit = self.settings.max_source_length
        target_ids, target_pieces = encode_lines(self.tokenizers.target, targets, limit, "translation", first_line)
        guidance = self.guide.steer(source_ids, attend)

        def score_batch(indices: Sequence[int]) -> list[Translation]:
            pairs = [source_ids[i] for i in indices], [target_ids[i] for i in indices]
            hypotheses = self._force(*pairs, guidance)
            # Keep the given text and its pieces: decoded tokens have <unk> for unknown words.
            forced = ((i, self.translation(source_pieces[i], one)) for i, one in zip(indices, hypotheses, strict=True))
            return [
                replace(translation, text=targets[i], tokens=target_pieces[i], text_pieces=target_pieces[i])
                for i, translation in forced
            ]

        def score_batches(batches: Sequence[list[int]]) -> Iterator[list[Translation]]:
            return (list(chain.from_iterable(retry_in_halves(score_batch, batch))) for batch in batches)

        longer = [max(pair, key=len) for pair in zip(source_ids, target_ids, strict=True)]
        results = self._shared(list(self.batches(longer, with_empty=True)), score_batches, progress)
        return [results[i] for i in range(len(sources))]

    def _force(self, sources: list[list[int]], targets: list[list[int]], guidance: Guidance) -> list[Hypothesis]:
        """Force the decoder to generate each source's target tokens, and score them as the search method would. The
        coverage of a latent alignment differs, as the known target word makes its weights those of the posterior."""
        batch = collate(sources, targets, self.tokenizers, np.arange(len(sources))).to(self.machine.device)
        pad, steering = self.tokenizers.target.pad, guidance.steering(batch.lengths.tolist(), self.machine.device)
        with self.machine.autocast():
            forced = self.model.force(batch.source, batch.lengths, batch.target_in, batch.target_out, pad, steering)
        hypotheses, log_probs = [], forced.log_probs.cpu()
        for row, (source, tokens) in enumerate(zip(sources, targets, strict=True)):
            length, weights = len(tokens), None
            if forced.weights is not None:
                weights = forced.weights[row, :length, : len(source)].float().cpu()
            total, of_tokens = float(log_probs[row, :length].sum()), log_probs[row, :length].tolist()
            score = self.method.score(total, length, weights)
            hypotheses.append(Hypothesis(tokens, score, total, weights, of_tokens))
        return hypotheses

    def _shared(
        self,
        batches: list[list[int]],
        run: Callable[[Sequence[list[int]]], Iterator[list[T]]],
        progress: Progress | None,
    ) -> dict[int, T]:
        """Share batches of sentence indices among the processes, and return the result of each index. `run` yields the
        results of each batch of this process."""

        def counted(results: Iterable[list[T]]) -> Iterator[list[T]]:
            for batch in results:
                yield batch
                if progress is not None:
                    progress(len(batch) * self.group.size)  # the processes advance about equally

        with torch.no_grad(), evaluation_mode(self.model):
            merged = self.group.merge(counted(run(self.group.share(batches))))
        return dict(zip(chain.from_iterable(batches), chain.from_iterable(merged), strict=True))

    def encode(self, lines: Sequence[str], first_line: int = 1) -> tuple[list[list[int]], list[list[str]]]:
        """Encode source lines into token ids and pieces, at most search.max_source_length tokens of each line."""
        if isinstance(lines, str):
            raise TypeError("a list of lines is expected, not one string")
        return encode_lines(self.tokenizers.source, lines, self.settings.max_source_length, "line", first_line)

    def translation(self, source_pieces: list[str], hypothesis: Hypothesis) -> Translation:
        """Decode a hypothesis into a translation of the source that has these pieces."""
        target, tokens = self.tokenizers.target, hypothesis.tokens
        text, alignment = target.decode(tokens), None
        pieces = text_pieces = target.pieces(tokens)
        if hypothesis.attention is not None:
            alignment = hypothesis.attention[:, : len(source_pieces)].numpy()
            if self.settings.replace_unknown and target.unk in tokens:
                text_pieces = copy_unknown(pieces, alignment, source_pieces)
                text = target.spell(text_pieces)
        scores = hypothesis.score, hypothesis.log_prob
        return Translation(text, *scores, source_pieces, pieces, alignment, hypothesis.token_log_probs, text_pieces)

    def _workers(self) -> int:
        """Return how many batches are searched at the same time, each in its own thread: for small batches on a CPU
        this beats threads that share each matrix product."""
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
        """Divide sentences into batches of sentence indices. The longest come first, so that there is little padding.

        search.batch_tokens limits source tokens x hypotheses per sentence in a search for the n best translations; the
        `workers` batches that are searched at the same time share this limit. Sentences without tokens are left out
        unless `with_empty`. Sentences with constraints are not mixed with others in a batch.
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

    def _search_batches(
        self, batches: Sequence[list[int]], sources: Sequence[list[int]], first: int, n: int, guidance: Guidance
    ) -> Iterator[list[list[Hypothesis]]]:
        """Search each batch of sentence indices, and yield its n-best lists. first: the line number of sentence 0."""
        threads, workers = torch.get_num_threads(), self._workers()

        def search_at_once(indices: list[int]) -> list[list[Hypothesis]]:
            with self._encoded_batch(indices, sources, first, guidance) as batch:
                return self.method(batch, n)

        def search_batch(indices: list[int]) -> list[list[Hypothesis]]:
            return list(chain.from_iterable(retry_in_halves(search_at_once, indices)))

        if workers == 1 or len(batches) == 1:
            if self.machine.device.type == "cpu":  # small batches are slower on several threads
                most = max((len(sources[i]) * len(batch) for batch in batches for i in batch), default=0)
                torch.set_num_threads(max(1, min(threads, most * self.method.width(n) // MIN_THREAD_TOKENS)))
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
            torch.set_num_threads(threads)  # some libraries use the number of the pool's threads in all threads

    def beam_tree(self, line: str, n: int, **controls: Unpack[Controls]) -> tuple[list[Translation], list[list[Node]]]:
        """Return the n best translations of a line, and the candidates of each step of their beam search. Raises
        UserError if the search method has no beam."""
        if not isinstance(self.method, BeamSearch):
            raise UserError(f"a beam's tree needs search=beam, but this search is {self.settings.kind}")
        self.method.check_nbest(n)
        (source,), (pieces,) = self.encode([line])
        if len(source) == 1:
            return self.translate_nbest([line], n)[0], []
        guidance = self.guide.make([line], [source], controls)
        with evaluation_mode(self.model), self._encoded_batch([0], [source], 0, guidance) as batch:
            (nbest,), steps = self.method.tree(batch, n)
        return [self.translation(pieces, hypothesis) for hypothesis in nbest], steps

    def discard_search_models(self) -> None:
        """Discard the search models, because parameters may have changed: torch does not record the updates of fused
        optimizers."""
        self._search_models.clear()

    @contextmanager
    def _encoded_batch(
        self, indices: Sequence[int], all_sources: Sequence[list[int]], first: int, guidance: Guidance
    ) -> Iterator[SearchBatch[Any]]:
        """Enter a context in which the sentences with these indices, longest first, are encoded and can be searched."""
        model, device, target = (
            self._search_models.get(self.method.beam_size),
            self.machine.device,
            self.tokenizers.target,
        )
        sources = [all_sources[i] for i in indices]
        lengths = [len(ids) for ids in sources]
        guidance, shortlist = guidance.of(indices), None
        if self.shortlist is not None:
            copied = chain.from_iterable(sources) if self.model.has_copy_gate else ()
            shortlist = self.shortlist.vocabulary(sources, [*guidance.tokens(), *copied])
        symbols = Symbols(target.bos, target.eos, (target.pad, target.bos))
        if shortlist is not None:
            guidance, symbols = guidance.within(shortlist), symbols.within(shortlist)
        if guidance.forbidden is not None:
            symbols = symbols._replace(banned=(*symbols.banned, *guidance.forbidden.always))
        with torch.no_grad(), self.machine.autocast():
            source = pad_sequence([torch.tensor(ids) for ids in sources], True, self.tokenizers.source.pad).to(device)
            vocabulary = None if shortlist is None else torch.from_numpy(shortlist).to(device)
            state: Any = model.encode(source, torch.tensor(lengths), vocabulary)
            steering = guidance.steering(lengths, device)
            yield SearchBatch(
                model.step,
                state if steering is None else state.steered(steering),
                symbols,
                Limits.of(self.settings, lengths, guidance.prefixes),
                device,
                lengths,
                partial(sentence_keys, (self.seed,), np.array(indices) + first),
                guidance,
                None if shortlist is None else shortlist.tolist(),
            )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Enter a context in which the model is in evaluation mode, so without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
