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
from nmt.translator import Translator

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
        totals = self.norms.sum(1, keepdims=True)
        shares: NDArray[np.floating[Any]] = self.norms / np.where(totals > 0, totals, 1.0)
        return shares


def saliency(translator: Translator, sources: Sequence[str], targets: Sequence[str]) -> list[Saliency]:
    """Norms of the gradients of each target token's log-probability with respect to the source embeddings (after
    Simonyan et al. 2014). Raises ValueError for unequal counts, UserError for an ensemble."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    # cuDNN's recurrent layers have no backward pass in evaluation mode.
    with evaluation_mode(translator.single), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        return [_of_pair(translator, *pair) for pair in zip(sources, targets, strict=True)]


def _of_pair(translator: Translator, source: str, target: str) -> Saliency:
    tokenizers = translator.tokenizers
    (source_ids,), (pieces,) = translator.encode([source])
    (target_ids,) = tokenizers.target.encode([target])
    batch = collate([source_ids], [target_ids], tokenizers, np.arange(1)).to(translator.machine.device)
    parts = torch.split(torch.arange(len(target_ids)), COPIES)
    norms = torch.cat([_norms(translator.single, batch, part) for part in parts]).cpu().numpy()
    return Saliency(pieces, tokenizers.target.surfaces([target])[0], norms)


def _norms(model: Seq2Seq, batch: Batch, tokens: Tensor) -> Tensor:
    """Gradient norms (N, S) for the target tokens (N,) of a batch of one pair.

    Copies the pair N times, so that one backward pass computes all rows.
    """
    N, tokens = len(tokens), tokens.to(batch.source.device)
    embedded = model.source_embedding(batch.source).detach().repeat(N, 1, 1).requires_grad_()
    state = model.encode_embedded(embedded, batch.lengths.repeat(N))
    decoded = model.decoder(model.target_embedding(batch.target_in).expand(N, -1, -1), state)
    rows = torch.arange(N, device=embedded.device)
    log_probs = model.output(decoded.readouts[rows, tokens]).log_softmax(-1)
    (gradient,) = torch.autograd.grad(log_probs[rows, batch.target_out[0, tokens]].sum(), embedded)
    norms: Tensor = gradient.norm(dim=-1)
    return norms
