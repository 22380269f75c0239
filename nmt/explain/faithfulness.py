"""Measures whether attention explains the output: how far it agrees with gradient saliency, and how much probability
target tokens lose when source tokens are masked in the order of attention, in that of saliency or at random.

`faithfulness` measures sentence pairs; `read_figures` reads the figures of a run for a comparison of several runs.
Shapes: N copies of a sentence pair, S source positions, T target positions, K = MASKS.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from torch import Tensor
from tqdm.auto import tqdm

from nmt.data.batching import Batch, collate
from nmt.data.tokenizer import encode_lines
from nmt.data.word_alignment import Link, alignment_error_rate, attention_to_links, parse_pharaoh
from nmt.explain.explanation import saliency, token_log_probs
from nmt.model.output import NEVER
from nmt.model.seq2seq import Seq2Seq
from nmt.system.machine import retry_in_halves
from nmt.translate.translator import Translator, evaluation_mode

Array = NDArray[np.floating[Any]]

MASKS = 5  # a masking curve masks up to this many source tokens
TOKENS = 4096  # a batch of masked copies has at most this many tokens on the longer side
ORDERS = ("attention", "saliency", "random")  # the orders in which source tokens are masked
FIGURES = ("tau", "aer_attention", "aer_saliency", "area_attention", "area_saliency", "area_random")


class PairFigures(NamedTuple):
    """The figures of one sentence pair. Without attention, `curves` and `links` have no key "attention"."""

    tau: Array | None  # (T,) rank correlation of attention and saliency, NaN where undefined; None without attention
    curves: dict[str, Array]  # (T, K + 1) masking curve for each order in ORDERS
    links: dict[str, set[Link]]  # links between words, for "attention" and "saliency"


def faithfulness(
    translator: Translator, sources: Sequence[str], references: Sequence[str], gold: Sequence[str] | None, count: int
) -> dict[str, Any]:
    """Measure whether attention explains the output (docs/faithfulness.md), on `count` sentence pairs that are spread
    evenly over all given pairs. The references serve as the output.

    Figures that need attention are None without attention, and those that need gold alignments are None without `gold`.
    The processes of the translator's group share the sentences. Raises UserError for an ensemble.
    """
    group = translator.group
    chosen = sorted({int(i) for i in np.linspace(0, len(sources) - 1, min(count, len(sources)))})

    def measure(progress: Callable[[int], object]) -> Iterator[PairFigures]:
        for i in group.share(chosen):
            yield measure_pair(translator, sources[i], references[i], i + 1)
            progress(group.size)  # counts one sentence for each rank: all are about equally fast

    bar = tqdm(total=len(chosen), desc="explain", unit=" sent", disable=group.hides_progress)
    with evaluation_mode(translator.single), bar:
        pairs = group.merge(measure(bar.update))
    return _figures(pairs, None if gold is None else [gold[i] for i in chosen])


def measure_pair(translator: Translator, source: str, reference: str, number: int) -> PairFigures:
    """Measure one sentence pair. Its random order of masking is seeded by the two texts, so that it is reproducible.

    number: line number of the pair, for the warning if a sentence is cut.
    """
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
        _curves(model, batch, orders),
        {name: attention_to_links(weights, pieces, source_pieces) for name, weights in views.items()},
    )


@torch.no_grad()
def _curves(model: Seq2Seq, batch: Batch, orders: Mapping[str, NDArray[np.int64]]) -> dict[str, Array]:
    """Mask source tokens of a batch of one pair, in several orders -> a masking curve (T, K + 1) for each order.

    orders: name of an order -> (T, min(K, S)) source positions, of which column 0 is masked first.
    """
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


def _figures(pairs: Sequence[PairFigures], gold: Sequence[str] | None) -> dict[str, Any]:
    """Average the figures of sentence pairs, given their gold alignments, for the entry in results.json."""
    curves = {name: np.concatenate([pair.curves[name] for pair in pairs]) for name in pairs[0].curves}
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    taus = [pair.tau[~np.isnan(pair.tau)] for pair in pairs if pair.tau is not None]
    if sum(map(len, taus)):
        figures["tau"] = round(float(np.concatenate(taus).mean()), 4)
    for view in pairs[0].links if gold is not None else ():
        scores = alignment_error_rate([pair.links[view] for pair in pairs], map(parse_pharaoh, gold or ()))
        figures[f"aer_{view}"] = round(scores.aer, 4)
    figures |= {f"area_{order}": round(float(areas(curve).mean()), 4) for order, curve in curves.items()}
    means = {name: [round(float(value), 4) for value in curve.mean(0)] for name, curve in curves.items()}
    return {"sentences": len(pairs), "tokens": len(curves["random"]), **figures, "curves": means}


def kendall_tau(first: Array, second: Array) -> Array:
    """Compute Kendall's tau-b of each row: (T, S), (T, S) -> (T,); NaN if either row has only equal values.

    (concordant - discordant) / sqrt((pairs - ties in first) (pairs - ties in second))   (Kendall 1945).
    """
    agreement, untied_first, untied_second = np.zeros((3, len(first)))
    for lag in range(1, first.shape[1]):  # compares all pairs of positions at this distance
        signs = np.sign(first[:, lag:] - first[:, :-lag])
        other_signs = np.sign(second[:, lag:] - second[:, :-lag])
        agreement += (signs * other_signs).sum(1)
        untied_first += np.abs(signs).sum(1)
        untied_second += np.abs(other_signs).sum(1)
    untied = np.sqrt(untied_first * untied_second)
    return np.where(untied > 0, agreement / np.where(untied > 0, untied, 1.0), np.nan)


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


Share = Annotated[float, Field(ge=0, le=1, strict=True)]


class Figures(BaseModel):
    """The form of the entry in results.json, which a user may have edited. Other keys in it are ignored."""

    sentences: Annotated[int, Field(gt=0, le=10**9, strict=True)]
    tau: Annotated[float, Field(ge=-1, le=1, strict=True)] | None
    aer_attention: Share | None
    aer_saliency: Share | None
    area_attention: Share | None
    area_saliency: Share | None
    area_random: Share | None
    curves: dict[
        Literal["attention", "saliency", "random"],
        Annotated[list[Share], Field(min_length=MASKS + 1, max_length=MASKS + 1)],
    ]


def read_figures(values: object) -> dict[str, Any]:
    """Read the figures of a run from its results.json, AER in percent; {} if the run has none.

    Raises ValueError if the values are damaged.
    """
    if values is None:
        return {}
    figures = Figures.model_validate(values).model_dump()
    figures["faithfulness_sentences"] = figures.pop("sentences")
    in_percent = {name: 100 * value for name, value in figures.items() if name.startswith("aer_") and value is not None}
    return {**figures, **in_percent, "curves": {order: figures["curves"].get(order, []) for order in ORDERS}}


def run_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run for its row in a comparison; a figure that the run lacks is None."""
    return {name: _rounded(figures.get(name)) for name in ("faithfulness_sentences", *FIGURES)}


def system_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute mean and standard deviation of each figure over the runs that have it, and the mean masking curves."""
    row: dict[str, Any] = {
        "faithfulness_sentences": min((run["faithfulness_sentences"] for run in runs if run), default=None),
        "masking_curves": {},
    }
    for name in FIGURES:
        values = [run[name] for run in runs if run.get(name) is not None]
        row[name] = _rounded(fmean(values)) if values else None
        row[f"{name}_sd"] = _rounded(stdev(values)) if len(values) > 1 else None
    for order in ORDERS:
        curves = [run["curves"][order] for run in runs if run and run["curves"][order]]
        if curves:
            row["masking_curves"][order] = [_rounded(fmean(values)) for values in zip(*curves, strict=True)]
    return row


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if isinstance(value, float) else value
