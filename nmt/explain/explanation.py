"""One sentence pair in depth: probabilities, attention with its heads, window and stops, and gradient saliency.

Saliency is how much the probability of an output token depends on each source token; compare it with attention weights.
Shapes: S source positions, T target positions, E width of an embedding; N heads in an `Explanation`, else N copies of a
sentence pair in a batch, each for one target token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.attention.attention import Attention
from nmt.config.errors import UserError
from nmt.data.batching import Batch, collate
from nmt.data.word_alignment import Weights
from nmt.model.seq2seq import Seq2Seq
from nmt.translate.guidance import prefix_tokens
from nmt.translate.search import Attend
from nmt.translate.translator import Translator, evaluation_mode

COPIES = 32  # copies of a sentence pair in a batch, at most; each gives the gradient of one target token
CELLS = COPIES * 64 * 64  # copies x target tokens x source tokens of a batch, at most: limits its memory


@dataclass(frozen=True)
class Explanation:
    """What a model does with one sentence pair. Positions count from 0."""

    source_tokens: list[str]  # pieces of the source, </s> last
    tokens: list[str]  # pieces of the translation, </s> last
    token_log_probs: list[float]  # natural log-probability of each token
    alignment: NDArray[np.float32] | None  # (T, S) weights, or a latent alignment's posterior; None without attention
    heads: NDArray[np.float32] | None  # (N, T, S) weights of N heads; None with a single head
    centres: list[float] | None  # centre of each step's window; None unless attention is local with one head
    reach: int | None  # number of positions on each side of a window's centre; None without centres
    # for each step, the position where monotonic reading stopped, or None if reading passed the end of the source; the
    # whole list is None unless attention is monotonic with one head
    stops: list[int | None] | None
    # (T, S) gradient norms, each row divided by its sum; None if not computed
    saliency: NDArray[np.floating[Any]] | None


def explain(
    translator: Translator,
    source: str,
    target: str | Sequence[str],
    *,
    attend: Attend | None = None,
    gradients: bool = True,
) -> Explanation:
    """Score a given translation, and record what the model attends to.

    target: a text, or pieces as in Translation.tokens; attend: see Translator.translate_nbest; gradients: True to
    compute saliency. Saliency ignores `attend`, and is never computed for an ensemble. Raises UserError for an unknown
    piece, a translation that is too long, or an `attend` that does not fit the source or the model.
    """
    (source_ids,), (source_pieces,) = translator.encode([source])
    target_ids, pieces = _target(translator, target)
    guidance = translator.guide.steer([source_ids], attend)
    device, pad = translator.machine.device, translator.tokenizers.target.pad
    batch = collate([source_ids], [target_ids], translator.tokenizers, np.arange(1)).to(device)
    steering = guidance.steering([len(source_ids)], device)
    model = translator.model
    with evaluation_mode(model), torch.no_grad(), translator.machine.autocast():
        inputs = batch.source, batch.lengths, batch.target_in, batch.target_out, pad, steering
        forced = model.force(*inputs, detailed=True)
    detail, heads, centres, reach, stops = forced.detail, None, None, None, None
    if detail is not None and detail.heads.shape[1] > 1:
        heads = detail.heads[0].float().cpu().numpy()
    elif detail is not None:
        centres = None if detail.centres is None else detail.centres[0, 0].tolist()
        if detail.stops is not None:
            stops = [None if stop < 0 else stop for stop in detail.stops[0, 0].tolist()]
    (first, *others) = model.models
    if centres is not None and isinstance(first.decoder.attention, Attention):
        reach = first.decoder.attention.window.reach
    of_gradients = None
    if gradients and not others:
        with evaluation_mode(model):
            of_gradients = saliency(first, batch)
    return Explanation(
        source_pieces,
        pieces,
        forced.log_probs[0].float().cpu().tolist(),
        None if forced.weights is None else forced.weights[0].float().cpu().numpy(),
        heads,
        centres,
        reach,
        stops,
        of_gradients,
    )


def _target(translator: Translator, target: str | Sequence[str]) -> tuple[list[int], list[str]]:
    """Encode a translation as token ids and pieces, </s> last. Raises UserError for an unknown piece, or if the
    translation is too long."""
    tokenizer, settings = translator.tokenizers.target, translator.settings
    if isinstance(target, str):
        (ids,), (pieces,) = tokenizer.encode([target]), tokenizer.surfaces([target])
    else:
        pieces = [*target] if target[-1:] == ["</s>"] else [*target, "</s>"]
        ids = [*prefix_tokens(tokenizer, pieces[:-1], "target"), tokenizer.eos]
    limit = max(settings.max_source_length, settings.max_length)
    if len(ids) > limit:
        raise UserError(
            f"target: has {len(ids)} tokens; the larger of search.max_length and search.max_source_length is {limit}"
        )
    return ids, pieces


def saliency(model: Seq2Seq, batch: Batch) -> NDArray[np.floating[Any]]:
    """Compute the saliency (T, S) of a batch of one pair: the norms |d log p(y_t | y_<t, x) / d x_s|, with x_s the
    embedding of source token s (Simonyan et al. 2014), divided by the sum of their row. A batch of N copies of the pair
    lets one backward pass compute the rows of N target tokens."""
    T, S = batch.target_out.shape[1], batch.source.shape[1]
    parts = []
    # cuDNN's recurrent layers have no backward pass in evaluation mode.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        for positions in torch.split(torch.arange(T), max(1, min(COPIES, CELLS // (T * S)))):
            embedded = model.source_embedding(batch.source).detach().repeat(len(positions), 1, 1).requires_grad_()
            source = batch.source.expand(len(positions), -1)
            log_probs = token_log_probs(model, batch, embedded, source, positions)
            (gradient,) = torch.autograd.grad(log_probs.sum(), embedded)
            parts.append(gradient.norm(dim=-1))
    norms = torch.cat(parts).cpu().numpy()
    totals = norms.sum(1, keepdims=True)
    normalised: NDArray[np.floating[Any]] = norms / np.where(totals > 0, totals, 1.0)
    return normalised


def token_log_probs(model: Seq2Seq, batch: Batch, embedded: Tensor, source: Tensor, positions: Tensor) -> Tensor:
    """Compute log p(y_t | y_<t, x_n), t = positions[n], for N versions x_n of a pair's source -> (N,).

    batch: holds only this pair; embedded: (N, S, E), the versions x_n; source: int64 (N, S), see
    Seq2Seq.encode; positions: int64 (N,) target positions. Decodes no further than the greatest of `positions`.
    """
    N, T = len(embedded), int(positions.max()) + 1
    copies, positions = torch.arange(N, device=embedded.device), positions.to(embedded.device)
    state = model.encode(source, batch.lengths.repeat(N), embedded)
    prediction = model.decode(batch.target_in[:, :T].expand(N, -1), state).prediction
    log_probs = prediction.at(copies, positions).log_probs(model.output.layer())
    return log_probs[copies, 0, batch.target_out[0, positions]]


class AttentionStatistics(NamedTuple):
    """Statistics of attention weights, averaged over the target tokens of several sentences.

    The weights of a target token are first scaled to sum to 1. A token whose weights are all 0 is left out: its
    monotonic attention has passed the end of the source.
    """

    entropy: float  # in nats; 0 if one position has all the weight, log S for uniform weights
    on_end: float  # weight on the source's last position, </s>


def attention_statistics(alignments: Sequence[Weights]) -> AttentionStatistics:
    """Compute the statistics of attention weights: one array (T, S) per sentence, averaged over the heads."""
    entropies, on_end = [np.zeros(0)], [np.zeros(0)]
    for weights in alignments:
        rows = weights[weights.any(1)]
        scaled = rows / rows.sum(1, keepdims=True)
        entropies.append(-(scaled * np.log(np.where(scaled > 0, scaled, 1.0))).sum(1))
        on_end.append(scaled[:, -1])
    if not sum(map(len, on_end)):
        return AttentionStatistics(0.0, 0.0)
    return AttentionStatistics(float(np.concatenate(entropies).mean()), float(np.concatenate(on_end).mean()))
