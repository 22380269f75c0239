"""Does attention explain the output? Its agreement with gradient saliency, and what masking source tokens costs.

Shapes: N copies of a sentence pair, S source positions, T target positions, E embedding, K = MASKS.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from nmt.data.batching import Batch, collate
from nmt.data.tokenizer import encode_lines
from nmt.data.word_alignment import Link, alignment_error_rate, attention_to_links, parse_pharaoh
from nmt.explain.masking_curves import (
    Array,
    areas,
    combined,
    kendall_tau,
    masking_curves,
    masking_order,
    mean_over_tokens,
)
from nmt.explain.saliency import gradient_norms, shares_of, token_log_probs
from nmt.model.copying import NEVER
from nmt.model.seq2seq import Seq2Seq, evaluation_mode
from nmt.system.machine import retry_in_halves
from nmt.system.text_table import Column, terminal
from nmt.translate.translator import Translator

TOKENS = 4096  # of the longer side in a batch of masked copies
VIEWS = ("attention", "saliency", "both")  # of which links are scored
ORDERS = ("attention", "saliency", "random")  # in which source tokens are masked


class PairFigures(NamedTuple):
    """The figures of one sentence pair. Without attention, curves and links are by saliency and at random only."""

    tau: Array | None  # (T,), NaN where undefined; None without attention
    curves: dict[str, Array]  # by order, (T, K + 1)
    links: dict[str, set[Link]]  # by view, between words


def faithfulness(
    translator: Translator, sources: Sequence[str], references: Sequence[str], gold: Sequence[str] | None, count: int
) -> dict[str, Any]:
    """Figures on `count` sentences, spread evenly over the set, with the references as output (docs/faithfulness.md).

    None stands for what is undefined: without attention, without gold alignments, or for one sentence alone. The
    processes of the translator's group share the sentences. Raises UserError for an ensemble.
    """
    group = translator.group
    chosen = sorted({int(i) for i in np.linspace(0, len(sources) - 1, min(count, len(sources)))})

    def measured(progress: Callable[[int], object]) -> Iterator[PairFigures]:
        for i in group.share(chosen):
            yield of_pair(translator, sources[i], references[i], i + 1)
            progress(group.size)  # the other processes are about as far

    bar = tqdm(total=len(chosen), desc="explain", unit=" sent", disable=group.hides_progress)
    with evaluation_mode(translator.single), bar:
        pairs = group.merge(measured(bar.update))
    return _figures(pairs, None if gold is None else [gold[i] for i in chosen])


def of_pair(translator: Translator, source: str, reference: str, number: int) -> PairFigures:
    """Figures of one sentence pair, whose texts alone determine its random order. Warnings of sentences that are cut
    have this line number."""
    tokenizers, model = translator.tokenizers, translator.single
    (source_ids,), (source_pieces,) = translator.encode([source], number)
    limit = translator.search.max_source_length
    (target_ids,), (pieces,) = encode_lines(tokenizers.target, [reference], limit, "reference", number)
    batch = collate([source_ids], [target_ids], tokenizers, np.arange(1)).to(translator.machine.device)
    views = {"saliency": shares_of(gradient_norms(model, batch))}
    if model.attends:
        with torch.no_grad(), translator.machine.autocast():
            weights = model.force(*batch[1:5], tokenizers.target.pad).weights
        assert weights is not None
        views["attention"] = weights[0].float().cpu().numpy()
        views["both"] = combined(views["attention"], views["saliency"])
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
    """What masking does to each token of a batch of one pair: orders (T, n) -> curves (T, K + 1)."""
    S, T = batch.source.shape[1], batch.target_out.shape[1]
    masks = [np.zeros((T, 1, S), bool)]  # the first copy of each target token is whole
    masks += [np.logical_or.accumulate(np.eye(S, dtype=bool)[order], axis=1) for order in orders.values()]
    rows = np.repeat(np.arange(T), sum(mask.shape[1] for mask in masks))[:, None]
    wanted = np.concatenate([rows, np.concatenate(masks, axis=1).reshape(-1, S)], axis=1)
    copies, places = np.unique(wanted, axis=0, return_inverse=True)  # orders share masks; sorted by target token
    at_a_time = max(1, TOKENS // max(S, T))
    parts = [copies[start : start + at_a_time] for start in range(0, len(copies), at_a_time)]
    work = partial(_masked_log_probs, model, batch)
    log_probs = torch.cat([found for part in parts for found in retry_in_halves(work, part)]).double().cpu().numpy()
    ends = np.cumsum([mask.shape[1] for mask in masks])
    unmasked, *masked = np.split(log_probs[places.reshape(T, -1)], ends[:-1], axis=1)
    return {name: masking_curves(each, unmasked[:, 0]) for name, each in zip(orders, masked, strict=True)}


def _masked_log_probs(model: Seq2Seq, batch: Batch, copies: NDArray[np.int64]) -> Tensor:
    """Copies of a batch of one pair, each a target token and what is masked of the source, (N, 1 + S) -> the target
    tokens' log-probabilities (N,).

    A masked token has the embedding 0, as a word that dropout drops in training: every model has it, while <unk> has a
    meaning only if there were unknown words in training. It is not copied, either.
    """
    masked = torch.from_numpy(copies[:, 1:] > 0).to(batch.source.device)
    embedded = model.source_embedding(batch.source).masked_fill(masked[:, :, None], 0.0)
    source = batch.source.masked_fill(masked, NEVER)
    rows = torch.from_numpy(copies[:, 0])
    return token_log_probs(model, batch, embedded, source, rows)


def _figures(pairs: Sequence[PairFigures], gold: Sequence[str] | None) -> dict[str, Any]:
    """Sentence pairs with their gold alignments -> the entry of results.json."""
    curves = {name: [pair.curves[name] for pair in pairs] for name in ORDERS if name in pairs[0].curves}
    figures: dict[str, Any] = {
        "sentences": len(pairs),
        "tokens": sum(len(pair.curves["random"]) for pair in pairs),
        **_mean("tau", [pair.tau for pair in pairs if pair.tau is not None]),
    }
    for view in VIEWS:
        figures[f"aer_{view}"] = None
        if gold is not None and view in pairs[0].links:
            scores = alignment_error_rate([pair.links[view] for pair in pairs], map(parse_pharaoh, gold))
            figures[f"aer_{view}"] = round(scores.aer, 4)
    for order in ORDERS:
        figures |= _mean(f"area_{order}", [areas(each) for each in curves.get(order, [])])
    means = {name: np.concatenate(each).mean(0) for name, each in curves.items()}
    return {**figures, "curves": {name: [round(float(value), 4) for value in mean] for name, mean in means.items()}}


def _mean(name: str, sentences: Sequence[Array]) -> dict[str, float | None]:
    mean, interval = mean_over_tokens(sentences) or (None, None)
    rounded = [None if value is None else round(value, 4) for value in (mean, interval)]
    return dict(zip((name, f"{name}_ci"), rounded, strict=True))


def summary(figures: Mapping[str, Any], total: int) -> str:
    """The figures as a table for the terminal; `total` is the number of sentences that they were sampled from."""

    def with_interval(name: str, decimals: int) -> str | None:
        value, interval = figures.get(name), figures.get(f"{name}_ci")
        spread = "" if interval is None else f" ± {interval:.{decimals}f}"
        return None if value is None else f"{value:.{decimals}f}{spread}"

    names = [*VIEWS, "random"]
    aer = [figures.get(f"aer_{name}") for name in names]
    rows = [
        ["AER %", *(None if value is None else f"{100 * value:.1f}" for value in aer)],
        ["area under the masking curve", *(with_interval(f"area_{name}", 3) for name in names)],
    ]
    columns = [Column("measure", ""), *(Column(name, name) for name in names)]
    cells = [dict(zip(["measure", *names], row, strict=True)) for row in rows if any(row[1:])]
    tau = with_interval("tau", 3)
    return "\n".join(
        [
            f"what attention explains: {figures['sentences']} of {total} sentences, {figures['tokens']:,} tokens",
            terminal(cells, columns),
            *([] if tau is None else [f"Kendall's tau of attention and saliency: {tau}"]),
        ]
    )
