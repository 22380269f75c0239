"""The Python API: Translator.load(run).translate(["..."]); Translator.load([run, run]) loads an ensemble.

Shapes: S source positions, T target positions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from nmt.config import schema
from nmt.config.compose import merge_search
from nmt.config.errors import UserError
from nmt.data.batching import collate
from nmt.data.tokenizer import Tokenizers, copy_unknown, encode_lines
from nmt.data.word_alignment import attention_to_links, format_pharaoh, merge_to_words, words
from nmt.model.checkpoints import load_runs
from nmt.model.ensemble import Ensemble
from nmt.model.seq2seq import Seq2Seq, evaluation_mode
from nmt.system.distributed import ProcessGroup
from nmt.system.machine import Machine, retry_in_halves
from nmt.system.run import RunDirectory, load_config
from nmt.translate.guidance import Attend, Controls, Guidance, make_guidance, steer, warn_of_unmet
from nmt.translate.search import Hypothesis
from nmt.translate.searcher import Searcher

if TYPE_CHECKING:
    from nmt.translate.shortlist import Shortlist

T = TypeVar("T")

Progress = Callable[[int], object]  # called with the number of sentences just finished


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float  # log-probability over its length penalty, with a coverage penalty; of search=mbr: mean utility
    log_prob: float  # natural logarithm
    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    alignment: NDArray[np.float32] | None  # (T, S) attention, a row for each of `tokens`; None without attention
    token_log_probs: list[float]  # of each of `tokens`, which sum to log_prob

    def word_alignment(self) -> str:
        """Pharaoh links between words, separated by spaces: each target word to the source word it attends to most."""
        if self.alignment is None:
            return ""
        return format_pharaoh(attention_to_links(self.alignment, self.tokens, self.source_tokens))

    def word_weights(self) -> dict[str, Any] | None:
        """Source words, target words ("</s>" last) and the attention between them in whole percent, a row for each
        target word. None without attention."""
        if self.alignment is None:
            return None
        weights = merge_to_words(self.alignment, self.tokens, self.source_tokens)
        percents = np.rint(100 * weights).astype(int).tolist()
        return {"source": words(self.source_tokens), "target": words(self.tokens), "weights": percents}


class Translator:
    """A trained model or an ensemble, with its tokenizers and search settings."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizers: Tokenizers,
        search: schema.Search,
        machine: Machine,
        seed: int = 1,
        group: ProcessGroup | None = None,
        shortlist: "Shortlist | None" = None,
    ) -> None:
        """group: the processes that translate the same lines and share the work, by default this process alone."""
        self.group = group or ProcessGroup()
        self.model, self.tokenizers = model, tokenizers
        self.machine = machine
        self.searcher = Searcher(model, tokenizers, search, machine, seed, shortlist)
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
        """Load a run's model, or the ensemble of several runs. None stands for the (first) run's own setting.

        `search` holds values that replace the run's own, such as {"beam_size": 10} or {"kind": "greedy"}. shortlist:
        "auto" or a file, see nmt.translate.shortlist; by default searches use the whole vocabulary. Raises UserError
        if a run cannot be loaded or if the runs do not share their tokenizers.
        """
        directories = [RunDirectory.existing(path) for path in ([run] if isinstance(run, str | Path) else run)]
        if not directories:
            raise UserError("run=[]: needs one run or several")
        configs = [load_config(directory.config) for directory in directories]
        config = configs[0]
        machine = Machine.choose(device or config.device, precision or config.precision, threads or config.threads)
        model, tokenizers = load_runs(directories, configs, checkpoint)
        settings = merge_search(config.search, search or {})
        seed = config.seed if seed is None else seed
        model = model.to(machine.device).eval()
        words = None
        if shortlist is not None:
            from nmt.translate.shortlist import load_shortlist

            words = load_shortlist(shortlist, directories[0], config)
        return cls(model, tokenizers, settings, machine, seed, group, words)

    @property
    def seed(self) -> int:
        """The seed of samples."""
        return self.searcher.seed

    @property
    def search(self) -> schema.Search:
        """The settings of the search."""
        return self.searcher.settings

    @property
    def single(self) -> Seq2Seq:
        """The one model. Raises UserError for an ensemble."""
        if len(self.model.models) > 1:
            raise UserError(
                f"gradients are defined for one model, not for an ensemble of {len(self.model.models)}; load one run"
            )
        return self.model.models[0]

    def with_search(self, settings: schema.Search) -> Self:
        """Return a translator with other search settings, which shares the model."""
        other = copy(self)
        other.searcher = self.searcher.with_settings(settings)
        return other

    def reseed(self) -> None:
        """Sample the next line as the first one: a sample depends on the seed and on the line's number since then."""
        self._translated = 0

    def translate(self, lines: Sequence[str], **controls: Unpack[Controls]) -> list[Translation]:
        """Return the best translation of each line; controls: see `translate_nbest`."""
        return [nbest[0] for nbest in self.translate_nbest(lines, 1, **controls)]

    def translate_nbest(
        self,
        lines: Sequence[str],
        n: int,
        progress: Progress | None = None,
        first_line: int = 1,
        **controls: Unpack[Controls],
    ) -> list[list[Translation]]:
        """Return the n best translations of each line, best first. Warnings number the lines from `first_line`.

        controls: `attend`, `prefix`, `prefixes`, `constraints`, `glossary`, `forbidden`, see
        nmt.translate.guidance.Controls. The translation is empty for an empty line, or if no hypothesis has a
        probability above 0. Raises UserError if the search cannot return n translations, or cannot be guided so.
        """
        searcher = self.searcher
        self.check_nbest(n)
        if self.model.training:
            searcher.invalidate_prepared()
        sources, pieces = self.encode(lines, first_line)
        guidance = make_guidance(searcher, lines, sources, controls, first_line)
        batches = list(searcher.batches(sources, workers=searcher.workers(), constraints=guidance.constraints, n=n))

        def search(batches: Sequence[list[int]]) -> Iterator[list[list[Translation]]]:
            hypotheses = searcher.search(batches, sources, self._translated, n, guidance)
            for batch, nbests in zip(batches, hypotheses, strict=True):
                yield [
                    searcher.method.best([self.translation(pieces[i], hypothesis) for hypothesis in nbest], n)
                    for i, nbest in zip(batch, nbests, strict=True)
                ]

        results = self._shared(batches, search, progress)
        empty = Translation("", 0.0, 0.0, ["</s>"], ["</s>"], None, [0.0])
        nbests = [results.get(i) or [empty] for i in range(len(lines))]
        warn_of_unmet(searcher, guidance, [nbest[0].tokens for nbest in nbests], first_line)
        self._translated += len(lines)
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
        """Score existing translations by forced decoding: their log-probability and attention.

        Both sides are truncated to search.max_source_length. `first_line` is the first line's number in warnings;
        attend: see nmt.translate.guidance.Controls.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
        source_ids, source_pieces = self.encode(sources, first_line)
        limit = self.search.max_source_length
        target_ids, target_pieces = encode_lines(self.tokenizers.target, targets, limit, "translation", first_line)
        guidance = steer(self.searcher, source_ids, attend)

        def force(indices: Sequence[int]) -> list[Translation]:
            pairs = [source_ids[i] for i in indices], [target_ids[i] for i in indices]
            hypotheses = self._force(*pairs, guidance)
            # The given text and its pieces, not <unk>, so that the word alignment counts each unknown word.
            return [
                replace(self.translation(source_pieces[i], hypothesis), text=targets[i], tokens=target_pieces[i])
                for i, hypothesis in zip(indices, hypotheses, strict=True)
            ]

        def score(batches: Sequence[list[int]]) -> Iterator[list[Translation]]:
            return (list(chain.from_iterable(retry_in_halves(force, batch))) for batch in batches)

        longer = [max(pair, key=len) for pair in zip(source_ids, target_ids, strict=True)]
        results = self._shared(list(self.searcher.batches(longer, with_empty=True)), score, progress)
        return [results[i] for i in range(len(sources))]

    def _force(self, sources: list[list[int]], targets: list[list[int]], guidance: Guidance) -> list[Hypothesis]:
        """Score target tokens as the search would."""
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
            score = self.searcher.method.score(total, length, weights)
            hypotheses.append(Hypothesis(tokens, score, total, weights, of_tokens))
        return hypotheses

    def _shared(
        self,
        batches: list[list[int]],
        run: Callable[[Sequence[list[int]]], Iterator[list[T]]],
        progress: Progress | None,
    ) -> dict[int, T]:
        """Share batches of indices among the processes; returns the result of each index."""
        with torch.no_grad(), evaluation_mode(self.model):
            results = run(self.group.share(batches))
            merged = self.group.merge(_counted(results, progress, self.group.size))
        return dict(zip(chain.from_iterable(batches), chain.from_iterable(merged), strict=True))

    def outside_shortlist(self, sources: Sequence[str], targets: Sequence[str]) -> float | None:
        """The share of the targets' tokens that are not in the shortlist of their source; None without a shortlist."""
        shortlist = self.searcher.shortlist
        if shortlist is None:
            return None
        limit = self.search.max_source_length
        target_ids, _ = encode_lines(self.tokenizers.target, targets, limit, "translation", 1)
        return shortlist.missing(self.encode(sources)[0], target_ids)

    def check_nbest(self, n: int) -> None:
        """Raise UserError if this search cannot return n translations."""
        self.searcher.method.check_nbest(n)

    def encode(self, lines: Sequence[str], first_line: int = 1) -> tuple[list[list[int]], list[list[str]]]:
        """Encode source lines into token ids and pieces, truncated to search.max_source_length."""
        if isinstance(lines, str):
            raise TypeError("a list of lines is expected, not one string")
        return encode_lines(self.tokenizers.source, lines, self.search.max_source_length, "line", first_line)

    def translation(self, source_pieces: list[str], hypothesis: Hypothesis) -> Translation:
        """Make the translation of a source, given as pieces, from a hypothesis."""
        target, tokens = self.tokenizers.target, hypothesis.tokens
        pieces, text, alignment = target.pieces(tokens), target.decode(tokens), None
        if hypothesis.attention is not None:
            alignment = hypothesis.attention[:, : len(source_pieces)].numpy()
            if self.search.replace_unknown and target.unk in tokens:
                text = copy_unknown(pieces, alignment, source_pieces)
        scores = hypothesis.score, hypothesis.log_prob
        return Translation(text, *scores, source_pieces, pieces, alignment, hypothesis.token_log_probs)


def _counted(batches: Iterable[list[T]], progress: Progress | None, processes: int) -> Iterator[list[T]]:
    """Report the progress of all processes, of which the others are about as far as this one."""
    for batch in batches:
        yield batch
        if progress is not None:
            progress(len(batch) * processes)
