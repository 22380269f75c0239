"""A lexical shortlist: the target tokens that a search may use for its source sentences. It is learnt from a run's
training corpus.

Shapes: N token pairs (a source and a target token), L tokens of a shortlist, V target vocabulary.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from nmt.config import schema
from nmt.config.errors import UserError, user_path
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus
from nmt.data.tokenizer import Tokenizers
from nmt.system.files import read_bytes, write_atomically
from nmt.system.run import RunDirectory
from nmt.translate.search import Ids
from nmt.translate.steps import BLOCK

log = logging.getLogger(__name__)

AUTO = "auto"
SHORTLIST = "shortlist.safetensors"  # name of the file in a run
MAX_CELLS = 2**25  # largest number of token pairs that are counted, with repetitions: about 1 GB
ITERATIONS = 5  # of expectation maximisation
PER_TOKEN = 16  # number of target tokens listed for each source token
FREQUENT = 512  # number of frequent target tokens that every sentence may use
MAX_BYTES = 2**30  # largest file that is read
MIN_COUNT = 0.3  # a token pair needs this expected count in the training corpus to be listed
MOST = 0.75  # largest fraction of the vocabulary in a shortlist; a longer one saves nothing


class Shortlist:
    """Lists the target tokens that translate each source token, and those that every sentence may use: the special and
    the most frequent ones (Jean et al. 2015, 3; Mi et al. 2016)."""

    def __init__(self, candidates: Ids, ends: Ids, always: Ids, size: int) -> None:
        """candidates: target tokens, those of source token s at indices from ends[s - 1] to ends[s] - 1; always: target
        tokens of every sentence; size: V. Raises ValueError if these do not fit together."""
        self.candidates, self.ends, self.always, self.size = candidates, ends, always, size
        used = np.concatenate([candidates, always])
        if len(ends) == 0 or ends[-1] != len(candidates) or (np.diff(ends, prepend=0) < 0).any():
            raise ValueError("its table does not match its offsets")
        if used.min() < 0 or used.max() >= size:
            raise ValueError(f"it names tokens outside a vocabulary of {size}")

    @classmethod
    def from_counts(
        cls,
        pairs: Ids,
        counts: NDArray[np.float64],
        sizes: tuple[int, int],
        special: Sequence[int],
        per_token: int,
        frequent: int,
    ) -> Self:
        """Make a shortlist from the counts (N,) of distinct token pairs, int64 (N,), source token * V + target token.

        Every sentence may use the `special` and the `frequent` most frequent target tokens. Of the others, each source
        token gets the `per_token` with the highest counts, if they reach MIN_COUNT. sizes: of both vocabularies.
        """
        source, target = np.divmod(pairs, sizes[1])
        totals = np.bincount(target, counts, sizes[1])
        most = np.argsort(-totals, kind="stable")[:frequent]
        always = np.unique(np.concatenate([np.asarray(special, np.int64), most[totals[most] > 0]]))
        rare = ~np.isin(target, always) & (counts >= MIN_COUNT)
        source, target, counts = source[rare], target[rare], counts[rare]
        order = np.lexsort((target, -counts, source))
        source, target = source[order], target[order]
        rank = np.arange(len(source)) - np.searchsorted(source, source)
        listed = rank < per_token
        ends = np.cumsum(np.bincount(source[listed], minlength=sizes[0]))
        return cls(target[listed].astype(np.int64), ends.astype(np.int64), always, sizes[1])

    def of(self, source: Iterable[int]) -> Ids:
        """Return the shortlist of a source sentence, int64 (L,), ascending."""
        parts = [self.candidates[self.ends[s - 1] if s else 0 : self.ends[s]] for s in set(source)]
        return np.unique(np.concatenate([self.always, *parts]))

    def vocabulary(self, sources: Iterable[Iterable[int]], extra: Sequence[int] = ()) -> Ids | None:
        """Join the shortlists of several sentences and the tokens `extra`: int64 (L,), ascending; None if these are
        nearly the whole vocabulary. Other tokens fill L up to a multiple of `BLOCK`, for `LogProbs`."""
        ids = np.union1d(self.of({token for source in sources for token in source}), np.asarray(extra, np.int64))
        if len(ids) > MOST * self.size - BLOCK:
            return None
        more = np.setdiff1d(np.arange(len(ids) + BLOCK), ids, assume_unique=True)[: -len(ids) % BLOCK]
        return np.sort(np.concatenate([ids, more]))

    def arrays(self) -> dict[str, Any]:
        """Return the arrays that a file stores."""
        return {"candidates": self.candidates, "ends": self.ends, "always": self.always}


def load_or_make_shortlist(value: str, run: RunDirectory, config: schema.TrainConfig) -> Shortlist:
    """Load a shortlist from a path, or for "auto" from the run, where it is first made and stored if missing. Raises
    UserError if that is impossible (an archive, a changed corpus) or if the file does not fit the tokenizers."""
    path = run.path / SHORTLIST if value == AUTO else user_path(value)
    tokenizers = Tokenizers.load(run.path, config.tokenizer.lowercase)
    if value == AUTO and not path.exists():
        if run.is_archive:
            raise UserError(
                f"shortlist=auto: {run.source} has no table; export a run that has been used with shortlist=auto"
            )
        write_atomically(path, save_safetensors(_make_shortlist(run, config).arrays()))
    try:
        arrays = load_safetensors(read_bytes(path, MAX_BYTES))
        shortlist = Shortlist(arrays["candidates"], arrays["ends"], arrays["always"], tokenizers.target.vocab_size)
    except OSError as error:
        raise UserError(f"shortlist={value}: {path} cannot be read ({error.strerror})") from None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"shortlist={value}: {path} is not a shortlist of this vocabulary ({error})") from None
    if len(shortlist.ends) != tokenizers.source.vocab_size:
        raise UserError(f"shortlist={value}: {path} belongs to another source vocabulary")
    return shortlist


def _make_shortlist(run: RunDirectory, config: schema.TrainConfig) -> Shortlist:
    prepared = prepare(config.data, config.tokenizer)
    if run.read_manifest().get("data", prepared.report).get("content") != prepared.report["content"]:
        raise UserError(f"shortlist=auto: the corpus has changed since {run.path} was trained")
    log.info("shortlist: making a table of translations from the training corpus, once for this run")
    target = prepared.tokenizers.target
    sizes = prepared.tokenizers.source.vocab_size, target.vocab_size
    pairs, counts = translation_counts(*_sample(prepared), sizes)
    special = [target.pad, target.unk, target.bos, target.eos]
    return Shortlist.from_counts(pairs, counts, sizes, special, PER_TOKEN, FREQUENT)


def _sample(prepared: PreparedCorpus) -> tuple[list[Ids], list[Ids]]:
    """Draw sentence pairs of the training corpus in random order, with at most MAX_CELLS token pairs in all."""
    split, cells = prepared.splits["train"], 0
    sources: list[Ids] = []
    targets: list[Ids] = []
    for index in np.random.default_rng(1).permutation(len(split)):
        source, target = split.source.ids(index), split.target.ids(index)
        cells += len(source) * len(target)
        if cells > MAX_CELLS and sources:
            break
        sources.append(source)
        targets.append(target)
    return sources, targets


def translation_counts(
    sources: Sequence[Ids], targets: Sequence[Ids], sizes: tuple[int, int], iterations: int = ITERATIONS
) -> tuple[Ids, NDArray[np.float64]]:
    """Train IBM Model 1 (Brown et al. 1993, 4.1) on sentence pairs by expectation maximisation. Returns the distinct
    token pairs, int64 (N,), each source token * V + target token, and their expected counts (N,)."""
    keys = [
        (np.asarray(source, np.int64)[None] * sizes[1] + np.asarray(target, np.int64)[:, None]).ravel()
        for source, target in zip(sources, targets, strict=True)
    ]
    pairs, cells = np.unique(np.concatenate(keys), return_inverse=True)
    lengths = np.concatenate([np.full(len(t), len(s)) for s, t in zip(sources, targets, strict=True)])
    starts = np.cumsum(lengths) - lengths  # index of the first token pair of each target token
    source_of_pair, probs = pairs // sizes[1], np.ones(len(pairs))
    counts: NDArray[np.float64] = probs
    for _ in range(iterations):
        posterior = probs[cells]
        posterior /= np.repeat(np.add.reduceat(posterior, starts), lengths)
        counts = np.bincount(cells, posterior, len(pairs)).astype(np.float64)
        totals = np.bincount(source_of_pair, counts, sizes[0])
        probs = counts / totals[source_of_pair]
    return pairs, counts
