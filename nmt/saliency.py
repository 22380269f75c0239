"""Gradient saliency: which source tokens a translation depends on by its gradients, beside what the attention says.

Shapes: B sentences, S source positions, T target positions, E embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.data.batching import Batch, collate
from nmt.model.seq2seq import Seq2Seq
from nmt.translator import Translator

COPIES = 32  # of a sentence pair at a time


@dataclass(frozen=True)
class Saliency:
    """Of one sentence pair."""

    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    norms: NDArray[np.floating[Any]]  # (T, S): |d log p(y_t | y_<t, x) / d x_s|, x_s the embedding of source token s

    @property
    def shares(self) -> NDArray[np.floating[Any]]:
        """(T, S), the norms of a row divided by their sum: to be looked at beside attention weights."""
        totals = self.norms.sum(1, keepdims=True)
        shares: NDArray[np.floating[Any]] = self.norms / np.where(totals > 0, totals, 1.0)
        return shares


def saliency(translator: Translator, sources: Sequence[str], targets: Sequence[str]) -> list[Saliency]:
    """Of given translations: the norm of the Jacobian of each token's log-probability with respect to each source
    token's embedding (after Simonyan et al. 2014). Raises ValueError for unequal counts, UserError for an ensemble,
    whose models each have embeddings of their own."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    model = translator.single
    was_training = model.training
    model.eval()
    # cuDNN's recurrent layers have no backward outside training.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        found = [_of_pair(translator, *pair) for pair in zip(sources, targets, strict=True)]
    model.train(was_training)
    return found


def _of_pair(translator: Translator, source: str, target: str) -> Saliency:
    model, tokenizers = translator.single, translator.tokenizers
    (source_ids,), (pieces,) = translator.encode([source])
    (target_ids,) = tokenizers.target.encode([target])
    batch = collate([source_ids], [target_ids], tokenizers, np.arange(1)).to(translator.machine.device)
    rows = [_rows(model, batch, part) for part in torch.split(torch.arange(len(target_ids)), COPIES)]
    return Saliency(pieces, tokenizers.target.surfaces([target])[0], torch.cat(rows).cpu().numpy())


def _rows(model: Seq2Seq, batch: Batch, tokens: Tensor) -> Tensor:
    """Rows of the Jacobian's norms: of the target tokens (N,) of a batch of one pair, (N, S).

    The pair is copied for each of them, so that one backward pass brings all rows.
    """
    N, tokens = len(tokens), tokens.to(batch.source.device)
    embedded = model.source_embedding(batch.source).detach().repeat(N, 1, 1).requires_grad_()
    state = model.encode_embedded(embedded, batch.lengths.repeat(N))
    decoded = model.decoder(model.target_embedding(batch.target_in).expand(N, -1, -1), state)
    each = torch.arange(N, device=embedded.device)
    log_probs = model.output(decoded.readouts[each, tokens]).log_softmax(-1)
    (jacobian,) = torch.autograd.grad(log_probs[each, batch.target_out[0, tokens]].sum(), embedded)
    norms: Tensor = jacobian.norm(dim=-1)
    return norms
