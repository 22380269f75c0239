"""Gradient saliency: which source tokens a translation really depends on, whatever the attention says.

Shapes: B sentences, S source positions, T target positions, E embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nmt.data.batching import collate
from nmt.translator import Translator


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
    token's embedding (Simonyan et al. 2014; for alignments Ding et al. 2019). Raises ValueError for unequal counts."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    was_training = translator.model.training
    translator.model.eval()
    # cuDNN's recurrent layers have no backward outside training.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        found = [_of_pair(translator, *pair) for pair in zip(sources, targets, strict=True)]
    translator.model.train(was_training)
    return found


def _of_pair(translator: Translator, source: str, target: str) -> Saliency:
    model, tokenizers = translator.model, translator.tokenizers
    ((source_ids,), (target_ids,)) = tokenizers.source.encode([source]), tokenizers.target.encode([target])
    T = len(target_ids)
    # One copy of the pair for each target token, so that one backward pass brings all rows of the Jacobian.
    batch = collate([source_ids] * T, [target_ids] * T, tokenizers, np.arange(T)).to(translator.machine.device)
    embedded = model.source_embedding(batch.source).detach().requires_grad_()
    state = model.encode_embedded(embedded, batch.lengths)
    decoded = model.decoder(model.target_embedding(batch.target_in), state)
    log_probs = model.output(decoded.readouts).log_softmax(-1)
    each = torch.arange(T, device=embedded.device)
    (jacobian,) = torch.autograd.grad(log_probs[each, each, batch.target_out[0]].sum(), embedded)
    return Saliency(
        tokenizers.source.surfaces([source])[0],
        tokenizers.target.pieces(target_ids),
        jacobian.norm(dim=-1).cpu().numpy(),
    )
