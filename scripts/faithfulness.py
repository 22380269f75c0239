"""Measure whether attention explains the output of trained runs (docs/faithfulness.md).

    python scripts/faithfulness.py RUN [RUN ...] [--split validation] [--sentences 20] [--output FILE]

Measures how far attention agrees with gradient saliency, and how much probability target tokens lose when source tokens
are masked in the order of attention, in that of saliency or at random. The references serve as the output. Prints a
table with a row for each run. FILE receives the figures as JSON, with the masking curves.

Shapes: N copies of a sentence pair, S source positions, T target positions, K = MASKS.
"""

import argparse
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from nmt.config.errors import UserError
from nmt.data.batching import Batch, collate
from nmt.data.tokenizer import encode_lines
from nmt.data.word_alignment import Link, alignment_error_rate, attention_to_links, parse_pharaoh
from nmt.explain.explanation import saliency, token_log_probs
from nmt.model.output import NEVER
from nmt.model.seq2seq import Seq2Seq
from nmt.system.files import to_json, write_atomically
from nmt.system.machine import retry_in_halves
from nmt.system.run import RunDirectory
from nmt.system.text_table import Column, decimals, markdown
from nmt.translate.translator import Translator, evaluation_mode

Array = NDArray[np.floating[Any]]

MASKS = 5  # a masking curve masks up to this many source tokens
TOKENS = 4096  # a batch of masked copies has at most this many tokens on the longer side
ORDERS = ("attention", "saliency", "random")  # the orders in which source tokens are masked
COLUMNS = [
    Column("run", "run"),
    Column("tau", "Kendall's tau", decimals(2)),
    Column("aer_attention", "AER %, attention", decimals(1)),
    Column("aer_saliency", "AER %, saliency", decimals(1)),
    Column("area_attention", "area, attention", decimals(2)),
    Column("area_saliency", "area, saliency", decimals(2)),
    Column("area_random", "area, random", decimals(2)),
    Column("sentences", "sentences"),
]


class PairFigures(NamedTuple):
    """The figures of one sentence pair. Without attention, `curves` and `links` have no key "attention"."""

    tau: Array | None  # (T,) rank correlation of attention and saliency, NaN where undefined; None without attention
    curves: dict[str, Array]  # (T, K + 1) masking curve for each order in ORDERS
    links: dict[str, set[Link]]  # links between words, for "attention" and "saliency"


def faithfulness(
    translator: Translator, sources: Sequence[str], references: Sequence[str], gold: Sequence[str] | None, count: int
) -> dict[str, Any]:
    """Measure `count` sentence pairs that are spread evenly over all given pairs. Figures that need attention are None
    without attention, and those that need gold alignments are None without `gold`."""
    chosen = sorted({int(i) for i in np.linspace(0, len(sources) - 1, min(count, len(sources)))})
    with evaluation_mode(translator.single):
        pairs = [
            measure_pair(translator, sources[i], references[i], i + 1)
            for i in tqdm(chosen, "explain", unit=" sent", disable=None, leave=False)
        ]
    return figures(pairs, None if gold is None else [gold[i] for i in chosen])


def measure_pair(translator: Translator, source: str, reference: str, number: int) -> PairFigures:
    """Measure one sentence pair. Its random order of masking is seeded by the two texts, so that it is reproducible.
    number: line number of the pair, for the warning if a sentence is cut."""
    tokenizers, model = translator.tokenizers, translator.single
    (source_ids,), (source_pieces,) = translator.encode([source], number)
    limit = translator.settings.max_source_length
    (target_ids,), (pieces,) = encode_lines(tokenizers.target, [reference], limit, "reference", number)
    batch = collate([source_ids], [target_ids], tokenizers, np.arange(1)).to(translator.machine.device)
    views = {"saliency": saliency(model, batch)}
    if model.attends:
        with torch.no_grad(), translator.machine.autocast():
            weights = model.force(*batch[1:5], tokenizers.target.pad).weights
        assert weights is not None
        views["attention"] = weights[0].float().cpu().numpy()
    random = np.random.default_rng(zlib.crc32(f"{source}\n{reference}".encode())).random(views["saliency"].shape)
    ranked = views | {"random": np.zeros_like(random)}
    orders = {name: masking_order(ranked[name], random) for name in ORDERS if name in ranked}
    return PairFigures(
        kendall_tau(views["attention"], views["saliency"]) if model.attends else None,
        curves_of(model, batch, orders),
        {name: attention_to_links(weights, pieces, source_pieces) for name, weights in views.items()},
    )


@torch.no_grad()
def curves_of(model: Seq2Seq, batch: Batch, orders: Mapping[str, NDArray[np.int64]]) -> dict[str, Array]:
    """Mask source tokens of a batch of one pair, in several orders -> a masking curve (T, K + 1) for each order.
    orders: name of an order -> (T, min(K, S)) source positions, of which column 0 is masked first."""
    S, T = batch.source.shape[1], batch.target_out.shape[1]
    masks = [np.zeros((T, 1, S), bool)]  # the first copy of each target token masks nothing
    masks += [np.logical_or.accumulate(np.eye(S, dtype=bool)[order], axis=1) for order in orders.values()]
    rows = np.repeat(np.arange(T), sum(mask.shape[1] for mask in masks))[:, None]
    wanted = np.concatenate([rows, np.concatenate(masks, axis=1).reshape(-1, S)], axis=1)
    # Different orders have some masks in common. Each distinct copy is computed once, sorted by target position.
    copies, places = np.unique(wanted, axis=0, return_inverse=True)
    at_a_time = max(1, TOKENS // max(S, T))
    parts = [copies[start : start + at_a_time] for start in range(0, len(copies), at_a_time)]
    work = partial(_masked_log_probs, model, batch)
    log_probs = torch.cat([result for part in parts for result in retry_in_halves(work, part)]).double().cpu().numpy()
    ends = np.cumsum([mask.shape[1] for mask in masks])
    unmasked, *masked = np.split(log_probs[places.reshape(T, -1)], ends[:-1], axis=1)
    return {name: masking_curves(part, unmasked[:, 0]) for name, part in zip(orders, masked, strict=True)}


def _masked_log_probs(model: Seq2Seq, batch: Batch, copies: NDArray[np.int64]) -> Tensor:
    """Compute the log-probability (N,) of a target token in each of N masked copies of a pair.

    copies: (N, 1 + S), the target position, then 1 where a source token is masked. A masked token has the embedding 0,
    as word dropout in training gives it. <unk> would not do, because it means something only to models that saw
    unknown words in training. The copy mechanism cannot copy a masked token.
    """
    masked = torch.from_numpy(copies[:, 1:] > 0).to(batch.source.device)
    embedded = model.source_embedding(batch.source).masked_fill(masked[:, :, None], 0.0)
    source = batch.source.masked_fill(masked, NEVER)
    rows = torch.from_numpy(copies[:, 0])
    return token_log_probs(model, batch, embedded, source, rows)


def figures(pairs: Sequence[PairFigures], gold: Sequence[str] | None) -> dict[str, Any]:
    """Average the figures of sentence pairs, given their gold alignments. AER is in percent."""
    curves = {name: np.concatenate([pair.curves[name] for pair in pairs]) for name in pairs[0].curves}
    found: dict[str, Any] = dict.fromkeys(column.key for column in COLUMNS[1:])
    taus = np.concatenate([pair.tau for pair in pairs if pair.tau is not None] or [np.zeros(0)])
    if not np.isnan(taus).all():
        found["tau"] = float(np.nanmean(taus))
    for view in pairs[0].links if gold is not None else ():
        scores = alignment_error_rate([pair.links[view] for pair in pairs], map(parse_pharaoh, gold or ()))
        found[f"aer_{view}"] = 100 * scores.aer
    found |= {f"area_{order}": float(areas(curve).mean()) for order, curve in curves.items()}
    found |= {"sentences": len(pairs), "tokens": len(curves["random"])}
    return {**found, "curves": {name: curve.mean(0).tolist() for name, curve in curves.items()}}


def kendall_tau(first: Array, second: Array) -> Array:
    """Compute Kendall's tau-b of each row: (T, S), (T, S) -> (T,); NaN if either row has only equal values."""
    return np.array([stats.kendalltau(*rows).statistic for rows in zip(first, second, strict=True)])


def masking_order(weights: Array, random: Array) -> NDArray[np.int64]:
    """Order source positions by falling weight, then by rising `random`: (T, S), (T, S) -> (T, min(K, S))."""
    return np.lexsort((random, -weights), axis=-1)[:, :MASKS]


def masking_curves(masked: Array, unmasked: Array) -> Array:
    """Compute the share of a token's probability that masking leaves, min(1, p(y_t | masked) / p(y_t)).

    masked: (T, n) log-probabilities with 1, 2, ... n source tokens masked, n <= K; unmasked: (T,) log-probabilities
    with none masked. Returns (T, K + 1) with 0 to K masked. If the source has n < K tokens, the last value is repeated.
    The ratio is cut at 1: an improbable token can become a thousand times as probable, which would outweigh all others.
    """
    kept = np.exp(np.minimum(masked - unmasked[:, None], 0.0))
    curves = np.concatenate([np.ones((len(kept), 1)), kept], axis=1)
    return np.pad(curves, ((0, 0), (0, MASKS + 1 - curves.shape[1])), mode="edge")


def areas(curves: Array) -> Array:
    """Compute the area under each curve (trapezoidal rule), divided by K: (T, K + 1) -> (T,), from 1 / (2 K) to 1."""
    area: Array = (curves[:, 1:] + curves[:, :-1]).sum(1) / (2 * (curves.shape[1] - 1))
    return area


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path)
    parser.add_argument("--split", choices=["validation", "test"], default="test")
    parser.add_argument("--sentences", type=int, default=200, help="spread evenly over the split; 200 by default")
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.sentences < 1:
        parser.error("--sentences must be at least 1")
    rows = []
    try:
        for path in options.runs:
            texts = RunDirectory.existing(path).held_out(options.split)
            rows.append({"run": str(path), **faithfulness(Translator.load(path), *texts, options.sentences)})
    except UserError as error:
        print(f"faithfulness: error: {error}", file=sys.stderr)
        return 2
    print(markdown(rows, COLUMNS))
    if options.output is not None:
        write_atomically(options.output, to_json({"split": options.split, "runs": rows}, indent=1).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
