"""The Python API: Translator.load(run).translate(["..."]), of several runs Translator.load([run, run]).

Shapes: B batch, S source positions, T target positions.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from nmt.config import schema
from nmt.config.compose import load_config, merge_search
from nmt.config.errors import UserError
from nmt.data.batching import collate
from nmt.data.prepared import padded
from nmt.data.tokenizer import Tokenizer, Tokenizers, copy_unknown
from nmt.machine import Machine, retry_in_halves
from nmt.metrics.alignment import attention_to_links, format_pharaoh, merge_to_words, words
from nmt.model.ensemble import Ensemble
from nmt.model.load import load_runs
from nmt.model.seq2seq import Seq2Seq
from nmt.run import RunDirectory
from nmt.search.beam import beam_search
from nmt.search.hypothesis import Hypothesis, LengthPenalty, Limits, Step, Symbols
from nmt.search.rollout import SamplingOptions, greedy_search, sample


@dataclass(frozen=True)
class Translation:
    """One translation of one line."""

    text: str
    score: float  # what translations are ranked by: the log-probability over its length penalty
    log_prob: float  # natural logarithm
    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    alignment: NDArray[np.float32] | None  # (T, S) attention, a row for each of `tokens`; None without attention

    def word_alignment(self) -> str:
        """Source-target pairs of words, which spaces separate, from each target word's strongest link (Pharaoh)."""
        if self.alignment is None:
            return ""
        return format_pharaoh(attention_to_links(self.alignment, self.tokens, self.source_tokens))

    def word_weights(self) -> dict[str, Any] | None:
        """Source words, target words ("</s>" last) and the attention between them: whole percents, a row for each
        target word. None without attention."""
        if self.alignment is None:
            return None
        weights = merge_to_words(self.alignment, self.tokens, self.source_tokens)
        percents = np.rint(100 * weights).astype(int).tolist()
        return {"source": words(self.source_tokens), "target": words(self.tokens), "weights": percents}


log = logging.getLogger(__name__)

LEAST_TOKENS = 1024  # of a batch, times the beam, that is worth a thread

Progress = Callable[[int], object]  # called with the number of sentences just finished


class Translator:
    """A trained model, or an ensemble, with its tokenizers and search."""

    def __init__(
        self,
        model: Seq2Seq | Ensemble,
        tokenizers: Tokenizers,
        search: schema.Search,
        machine: Machine,
        seed: int = 1,
    ) -> None:
        self.model, self.tokenizers, self.search = model, tokenizers, search
        self.machine, self.seed = machine, seed
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
    ) -> Self:
        """A run's model, or the ensemble of several; None means: as the (first) run was trained. Raises UserError if
        there is none, or if the runs have not the same tokenizers.

        `search` holds values that replace the run's own, e.g. {"beam_size": 10} or a whole {"kind": "greedy"}.
        """
        directories = [RunDirectory.existing(each) for each in ([run] if isinstance(run, str | Path) else run)]
        if not directories:
            raise UserError("run=[]: needs one run or several")
        configs = [load_config(directory.config) for directory in directories]
        config = configs[0]
        machine = Machine.choose(
            device or config.device, precision or config.precision, config.threads if threads is None else threads
        )
        model, tokenizers = load_runs(directories, configs, checkpoint)
        settings = merge_search(config.search, search or {})
        seed = config.seed if seed is None else seed
        return cls(model.to(machine.device).eval(), tokenizers, settings, machine, seed)

    @property
    def single(self) -> Seq2Seq:
        """The model, for what takes one alone. Raises UserError for an ensemble."""
        if isinstance(self.model, Ensemble):
            raise UserError(
                f"gradients are those of one model, not of an ensemble of {len(self.model.members)}; load one run"
            )
        return self.model

    def reseed(self) -> None:
        """Let sampling draw again what it drew first."""
        self._generator = torch.Generator(self.machine.device).manual_seed(self.seed)

    def translate(self, lines: Sequence[str]) -> list[Translation]:
        """The best translation of each line."""
        return [nbest[0] for nbest in self.translate_nbest(lines, 1)]

    @torch.no_grad()
    def translate_nbest(
        self, lines: Sequence[str], n: int, progress: Progress | None = None, first_line: int = 1
    ) -> list[list[Translation]]:
        """The n best translations of each line, best first. An empty translation is that of an empty line, and of one
        where nothing has a finite probability.

        `first_line` is the number of the first line, for warnings.
        """
        self.check_nbest(n)
        sources, surfaces = self.encode(lines, first_line)
        results: list[list[Translation]] = [[_nothing()] for _ in lines]
        was_training = self.model.training
        self.model.eval()
        for batch, found in self._searched(sources, n):
            for index, hypotheses in zip(batch, found, strict=True):
                results[index] = [self._translation(surfaces[index], h) for h in hypotheses] or results[index]
            if progress is not None:
                progress(len(batch))
        self.model.train(was_training)
        return results

    @torch.no_grad()
    def score(self, sources: Sequence[str], targets: Sequence[str], first_line: int = 1) -> list[Translation]:
        """Forced decoding: what the model thinks of given translations, and how it aligns them.

        Both sides are cut to the longest source allowed. `first_line` is the number of the first line, for warnings.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
        encoded, surfaces = self.encode(sources, first_line)
        wanted, written = self._cut(self.tokenizers.target, targets, first_line, "translation")
        longer = [max(pair, key=len) for pair in zip(encoded, wanted, strict=True)]
        results: dict[int, Translation] = {}
        was_training = self.model.training
        self.model.eval()

        def force(indices: list[int]) -> None:
            batch = collate(
                [encoded[i] for i in indices],
                [wanted[i] for i in indices],
                self.tokenizers,
                np.asarray(indices),
            ).to(self.machine.device)
            with self.machine.autocast():
                forced = self.model.force(
                    batch.source, batch.lengths, batch.target_in, batch.target_out, self.tokenizers.target.pad
                )
            log_probs = forced.log_probs.cpu()
            for row, index in enumerate(indices):
                target, length = wanted[index], len(wanted[index])
                weights = None
                if forced.weights is not None:
                    weights = forced.weights[row, :length, : len(encoded[index])].float().cpu()
                total = float(log_probs[row, :length].sum())
                found = Hypothesis(list(target), total / self._penalty()(length), total, weights)
                # As they are written, not <unk>: of several unknown words each counts in the word alignment.
                results[index] = replace(
                    self._translation(surfaces[index], found), text=targets[index], tokens=written[index]
                )

        for indices in self._batches(longer, with_empty=True):
            retry_in_halves(force, indices)
        self.model.train(was_training)
        return [results[i] for i in range(len(encoded))]

    def check_nbest(self, n: int) -> None:
        """Raises UserError if this search does not find so many translations."""
        if isinstance(self.search, schema.Beam) and n > self.search.beam_size:
            raise UserError(f"nbest={n}: a beam of {self.search.beam_size} finds no more; set search.beam_size={n}")
        if isinstance(self.search, schema.Greedy) and n > 1:
            raise UserError(f"nbest={n}: greedy search finds one; use search=beam search.beam_size={n}")

    def encode(self, lines: Sequence[str], first_line: int = 1) -> tuple[list[list[int]], list[list[str]]]:
        """Lines -> ids and pieces of each, cut to the longest source allowed."""
        if isinstance(lines, str):
            raise TypeError("a list of lines is expected, not one string")
        return self._cut(self.tokenizers.source, lines, first_line, "line")

    def _cut(
        self, tokenizer: Tokenizer, lines: Sequence[str], first_line: int, name: str
    ) -> tuple[list[list[int]], list[list[str]]]:
        """Ids and pieces of lines, cut to the longest source allowed.

        One line after another, so that memory holds the tokens of one endless line, not of many.
        """
        encoded: list[list[int]] = []
        surfaces: list[list[str]] = []
        limit = self.search.max_source_length
        for number, line in enumerate(lines, first_line):
            (ids,), (pieces,) = tokenizer.encode([line]), tokenizer.surfaces([line])
            if len(ids) > limit:
                log.warning("%s %d has %d tokens: cut to search.max_source_length=%d", name, number, len(ids), limit)
                del ids[limit - 1 : -1], pieces[limit - 1 : -1]  # keeps </s>
            encoded.append(ids)
            surfaces.append(pieces)
        return encoded, surfaces

    def _searched(self, sources: list[list[int]], n: int) -> Iterator[tuple[list[int], list[list[Hypothesis]]]]:
        """Batches of indices with what was found for them.

        On a CPU its threads take a batch each: that also spreads what is too small to be worth two threads. Sampling
        stays in order, as its batches draw from one generator.
        """
        threads = torch.get_num_threads()
        parts = 1
        if self.machine.device.type == "cpu" and not isinstance(self.search, schema.Sampling):
            parts = max(1, min(threads, self.search.batch_tokens // LEAST_TOKENS))
        batches = list(self._batches(sources, parts=parts))
        if parts == 1 or len(batches) == 1:
            for batch in batches:
                yield batch, self._found([sources[i] for i in batch], n)
            return
        pool = ThreadPoolExecutor(parts, initializer=torch.set_num_threads, initargs=(threads // parts,))
        try:
            found = pool.map(lambda batch: self._found([sources[i] for i in batch], n), batches)
            yield from zip(batches, found, strict=True)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # some libraries know but one number for all threads

    def _batches(self, sources: list[list[int]], with_empty: bool = False, parts: int = 1) -> Iterator[list[int]]:
        """Indices by descending length, so that a batch has little padding; lines without any token left out.

        So many `parts` are translated at the same time.
        """
        order = [i for i in range(len(sources)) if with_empty or len(sources[i]) > 1]
        order.sort(key=lambda i: -len(sources[i]))
        width = self.search.beam_size if isinstance(self.search, schema.Beam) else 1
        budget = self.search.batch_tokens // (width * parts)
        start = 0
        while start < len(order):
            size = max(1, budget // len(sources[order[start]]))
            yield order[start : start + size]
            start += size

    def _found(self, sources: list[list[int]], n: int) -> list[list[Hypothesis]]:
        """As `_search`, by halves where memory does not suffice for all at once."""
        return [found for part in retry_in_halves(lambda some: self._search(some, n), sources) for found in part]

    @torch.no_grad()
    def _search(self, sources: list[list[int]], n: int) -> list[list[Hypothesis]]:
        """Token ids, longest first -> the n best hypotheses of each."""
        config, device, target = self.search, self.machine.device, self.tokenizers.target
        source = torch.from_numpy(padded(sources, self.tokenizers.source.pad)).to(device)
        lengths = torch.tensor([len(ids) for ids in sources])
        symbols = Symbols(target.bos, target.eos, banned=(target.pad, target.bos))
        longest = [min(config.max_length, int(config.max_ratio * len(ids)) + 10) for ids in sources]
        limits = Limits(max(0, config.min_length - 1), longest)
        penalty = self._penalty()
        with self.machine.autocast():
            state: Any = self.model.encode(source, lengths)
            step: Step[Any] = self.model.step
            match config:
                case schema.Greedy():
                    found = greedy_search(step, state, symbols, limits, penalty=penalty, device=device)
                case schema.Beam():
                    found = beam_search(
                        step,
                        state,
                        symbols,
                        limits,
                        beam_size=config.beam_size,
                        n_best=n,
                        penalty=penalty,
                        stop=config.stop,
                        device=device,
                    )
                case schema.Sampling():
                    options = SamplingOptions(config.temperature, config.top_k, config.top_p, n)
                    found = sample(
                        step,
                        state,
                        symbols,
                        limits,
                        options=options,
                        generator=self._generator,
                        penalty=penalty,
                        device=device,
                    )
        return found

    def _penalty(self) -> LengthPenalty:
        if isinstance(self.search, schema.Beam):
            return LengthPenalty(self.search.length_penalty, self.search.alpha)
        return LengthPenalty("none", 0.0)

    def _translation(self, source: list[str], found: Hypothesis) -> Translation:
        target = self.tokenizers.target
        pieces, text = target.pieces(found.tokens), target.decode(found.tokens)
        alignment = None if found.attention is None else found.attention[:, : len(source)].numpy()
        if self.search.replace_unknown and alignment is not None and target.unk in found.tokens:
            text = copy_unknown(pieces, alignment, source)
        return Translation(text, found.score, found.log_prob, source, pieces, alignment)


def _nothing() -> Translation:
    return Translation("", 0.0, 0.0, ["</s>"], ["</s>"], None)
