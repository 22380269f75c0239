"""Gradient saliency: how much a translation depends on each source token, for comparison with attention weights.

Shapes: N target tokens at a time, S source positions, T target positions, E embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.data.batching import Batch, collate
from nmt.model.seq2seq import Seq2Seq, evaluation_mode
from nmt.translate.translator import Translator

COPIES = 32  # of a sentence pair in a batch


@dataclass(frozen=True)
class Saliency:
    """Saliency of one sentence pair."""

    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    norms: NDArray[np.floating[Any]]  # (T, S): |d log p(y_t | y_<t, x) / d x_s|, x_s the embedding of source token s

    @property
    def shares(self) -> NDArray[np.floating[Any]]:
        """(T, S), each row divided by its sum, as attention weights are."""
        return shares_of(self.norms)


def saliency(translator: Translator, sources: Sequence[str], targets: Sequence[str]) -> list[Saliency]:
    """Norms of the gradients of each target token's log-probability with respect to the source embeddings (after
    Simonyan et al. 2014). Raises ValueError for unequal counts, UserError for an ensemble."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    with evaluation_mode(translator.single):
        return [_of_pair(translator, *pair) for pair in zip(sources, targets, strict=True)]


def shares_of(norms: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Gradient norms (T, S) -> (T, S), each row divided by its sum."""
    totals = norms.sum(1, keepdims=True)
    shares: NDArray[np.floating[Any]] = norms / np.where(totals > 0, totals, 1.0)
    return shares


def _of_pair(translator: Translator, source: str, target: str) -> Saliency:
    tokenizers = translator.tokenizers
    (source_ids,), (pieces,) = translator.encode([source])
    (target_ids,) = tokenizers.target.encode([target])
    batch = collate([source_ids], [target_ids], tokenizers, np.arange(1)).to(translator.machine.device)
    return Saliency(pieces, tokenizers.target.surfaces([target])[0], gradient_norms(translator.single, batch))


def gradient_norms(model: Seq2Seq, batch: Batch) -> NDArray[np.floating[Any]]:
    """Gradient norms (T, S) of a batch of one pair. Copies the pair N times, so that one backward pass computes N
    rows."""
    parts = torch.split(torch.arange(batch.target_out.shape[1]), COPIES)
    # cuDNN's recurrent layers have no backward pass in evaluation mode.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        return torch.cat([_norms(model, batch, part) for part in parts]).cpu().numpy()


def _norms(model: Seq2Seq, batch: Batch, rows: Tensor) -> Tensor:
    """Gradient norms (N, S) for the target tokens (N,) of a batch of one pair."""
    embedded = model.source_embedding(batch.source).detach().repeat(len(rows), 1, 1).requires_grad_()
    source = batch.source.expand(len(rows), -1)
    log_probs = token_log_probs(model, batch, embedded, source, rows)
    (gradient,) = torch.autograd.grad(log_probs.sum(), embedded)
    norms: Tensor = gradient.norm(dim=-1)
    return norms


def token_log_probs(model: Seq2Seq, batch: Batch, embedded: Tensor, source: Tensor, rows: Tensor) -> Tensor:
    """log p(y_t | y_<t, x) of the target token t = rows[n] of a batch of one pair, for each embedded source n.

    (N, S, E), int64 (N, S) as in Seq2Seq.encode_embedded, (N,) -> (N,). Decodes no further than the last of `rows`.
    """
    N, T = len(embedded), int(rows.max()) + 1
    copies, rows = torch.arange(N, device=embedded.device), rows.to(embedded.device)
    state = model.encode_embedded(embedded, batch.lengths.repeat(N), source)
    predictions = model.decode(batch.target_in[:, :T].expand(N, -1), state).predictions
    if isinstance(predictions, Tensor):
        log_probs = model.logits(predictions[copies, rows]).log_softmax(-1)
    else:
        log_probs = model.logits(predictions.at(copies, rows))[:, 0]
    return log_probs[copies, batch.target_out[0, rows]]
