"""Making a run's lexical shortlist from its training corpus.

Shapes: N pairs of tokens, V target vocabulary.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.overrides import user_path
from nmt.data.prepare.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.data.tokenizer import Tokenizers
from nmt.system.files import read_bytes, write_atomically
from nmt.system.run import RunDirectory
from nmt.translate.search.shortlist import Ids, Shortlist

log = logging.getLogger(__name__)

AUTO = "auto"
SHORTLIST = "shortlist.safetensors"  # in a run
MAX_CELLS = 2**25  # pairs of a source and a target token in a sentence pair, over all sentence pairs: about 1 GB
ITERATIONS = 5  # of expectation maximisation
PER_TOKEN = 16  # target tokens for each source token
FREQUENT = 512  # target tokens for every sentence
MAX_BYTES = 2**30  # of a file


def load_shortlist(value: str, run: RunDirectory, config: schema.TrainConfig) -> Shortlist:
    """value: the path of a shortlist; or "auto": the run's own, which is made and kept with the run if there is none.

    Raises UserError if the training corpus has changed, or if a file is not a shortlist for the run's tokenizers.
    """
    own = run.path / SHORTLIST
    path = own if value == AUTO else user_path(value)
    tokenizers = Tokenizers.load(run.path, config.tokenizer.lowercase)
    if value == AUTO and not own.exists():
        if run.is_archive:
            raise UserError(
                f"shortlist=auto: {run.source} has no table; export a run that has been used with shortlist=auto"
            )
        write_atomically(own, save_safetensors(_made(run, config).arrays()))
    try:
        arrays = load_safetensors(read_bytes(path, MAX_BYTES))
        shortlist = Shortlist(arrays["candidates"], arrays["ends"], arrays["always"], _sizes(tokenizers)[1])
    except OSError as error:
        raise UserError(f"shortlist={value}: {path} cannot be read ({error.strerror})") from None
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"shortlist={value}: {path} is not a shortlist of this vocabulary ({error})") from None
    if len(shortlist.ends) != _sizes(tokenizers)[0]:
        raise UserError(f"shortlist={value}: {path} belongs to another source vocabulary")
    return shortlist


def _made(run: RunDirectory, config: schema.TrainConfig) -> Shortlist:
    prepared = prepare(config.data, config.tokenizer)
    if run.read_manifest().get("data", prepared.report).get("content") != prepared.report["content"]:
        raise UserError(f"shortlist=auto: the corpus has changed since {run.path} was trained")
    log.info("shortlist: making a table of translations from the training corpus, once for this run")
    target, sizes = prepared.tokenizers.target, _sizes(prepared.tokenizers)
    pairs, counts = translation_counts(*_sample(prepared), sizes)
    special = [target.pad, target.unk, target.bos, target.eos]
    return Shortlist.from_counts(pairs, counts, sizes, special, PER_TOKEN, FREQUENT)


def _sample(prepared: Prepared) -> tuple[list[Ids], list[Ids]]:
    """Pairs of the training corpus in random order, until they have MAX_CELLS pairs of a source and a target token."""
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
    """IBM Model 1 (Brown et al. 1993, 4.1), trained by expectation maximisation: distinct pairs (N,), each as source
    token * V + target token, and how often the model expects the one to translate the other (N,)."""
    keys = [
        (np.asarray(source, np.int64)[None] * sizes[1] + np.asarray(target, np.int64)[:, None]).ravel()
        for source, target in zip(sources, targets, strict=True)
    ]
    pairs, cells = np.unique(np.concatenate(keys), return_inverse=True)
    lengths = np.concatenate([np.full(len(t), len(s)) for s, t in zip(sources, targets, strict=True)])
    starts = np.cumsum(lengths) - lengths  # of each target token's cells
    source_of_pair, probs = pairs // sizes[1], np.ones(len(pairs))
    counts: NDArray[np.float64] = probs
    for _ in range(iterations):
        posterior = probs[cells]
        posterior /= np.repeat(np.add.reduceat(posterior, starts), lengths)
        counts = np.bincount(cells, posterior, len(pairs)).astype(np.float64)
        totals = np.bincount(source_of_pair, counts, sizes[0])
        probs = counts / totals[source_of_pair]
    return pairs, counts


def _sizes(tokenizers: Tokenizers) -> tuple[int, int]:
    return tokenizers.source.vocab_size, tokenizers.target.vocab_size
