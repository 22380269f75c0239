"""One sentence pair in depth: probabilities, attention with its heads, window and stops, and gradient saliency.

Shapes: S source positions, T target positions, N heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nmt.attention.attention import Attention
from nmt.config.errors import UserError
from nmt.data.batching import collate
from nmt.explain.saliency import gradient_norms, shares_of
from nmt.model.ensemble import Ensemble
from nmt.model.seq2seq import evaluation_mode
from nmt.translate.guidance import Attend, prefix_tokens
from nmt.translate.search.tree import Node
from nmt.translate.terminology import make_guidance, steer
from nmt.translate.translation import Translation
from nmt.translate.translator import Translator


@dataclass(frozen=True)
class Explanation:
    """What a model does with one sentence pair. Positions count from 0."""

    source_tokens: list[str]  # pieces, </s> last
    tokens: list[str]  # pieces, </s> last
    token_log_probs: list[float]  # natural logarithms
    alignment: NDArray[np.float32] | None  # (T, S) attention; with a latent position its posterior; None without
    heads: NDArray[np.float32] | None  # (N, T, S), of two heads or more
    centres: list[float] | None  # of each step's window, if the attention is local
    reach: int | None  # of the window to either side
    stops: list[int | None] | None  # where monotonic reading stopped; None: it read past the end
    saliency: NDArray[np.floating[Any]] | None  # (T, S), shares of the gradient norms: each row sums to 1

    @property
    def log_prob(self) -> float:
        """The log-probability of the whole translation, natural logarithm."""
        return sum(self.token_log_probs)


def explain(
    translator: Translator,
    source: str,
    target: str | Sequence[str],
    *,
    attend: Attend | None = None,
    saliency: bool = True,
) -> Explanation:
    """Forced decoding of a translation, a text or pieces as in Translation.tokens.

    attend: see Translator.translate_nbest; saliency, of one model only, is that without it. Raises UserError for an
    unknown piece, an impossible step or a translation that is too long.
    """
    (source_ids,), (source_pieces,) = translator.encode([source])
    target_ids, pieces = _target(translator, target)
    guidance = steer(translator.searcher, [source_ids], attend)
    device, pad = translator.machine.device, translator.tokenizers.target.pad
    batch = collate([source_ids], [target_ids], translator.tokenizers, np.arange(1)).to(device)
    steering = guidance.steering([len(source_ids)], device)
    model = translator.model
    with evaluation_mode(model), torch.no_grad(), translator.machine.autocast():
        inputs = batch.source, batch.lengths, batch.target_in, batch.target_out, pad, steering
        forced = model.force(*inputs) if isinstance(model, Ensemble) else model.force(*inputs, detailed=True)
    detail, heads, centres, reach, stops = forced.detail, None, None, None, None
    if detail is not None and detail.heads.shape[1] > 1:
        heads = detail.heads[0].float().cpu().numpy()
    elif detail is not None:
        centres = None if detail.centres is None else detail.centres[0, 0].tolist()
        if detail.stops is not None:
            stops = [None if stop < 0 else stop for stop in detail.stops[0, 0].tolist()]
    if centres is not None and not isinstance(model, Ensemble) and isinstance(model.decoder.attention, Attention):
        reach = model.decoder.attention.window.reach
    norms = None
    if saliency and not isinstance(model, Ensemble):
        with evaluation_mode(model):
            norms = shares_of(gradient_norms(model, batch))
    return Explanation(
        source_pieces,
        pieces,
        forced.log_probs[0].float().cpu().tolist(),
        None if forced.weights is None else forced.weights[0].float().cpu().numpy(),
        heads,
        centres,
        reach,
        stops,
        norms,
    )


def beam_tree(
    translator: Translator, source: str, n: int, *, attend: Attend | None = None, prefix: str | Sequence[str] = ""
) -> tuple[list[Translation], list[list[Node]]]:
    """The n best translations of a line, and the candidates of each step of their beam search.

    attend, prefix: see Translator.translate_nbest. Raises UserError for another kind of search.
    """
    translator.check_nbest(n)
    (source_ids,), (pieces,) = translator.encode([source])
    if len(source_ids) == 1:
        return translator.translate_nbest([source], n)[0], []
    guidance = make_guidance(translator.searcher, [source], [source_ids], {"attend": attend, "prefix": prefix})
    with evaluation_mode(translator.model):
        found, steps = translator.searcher.tree(source_ids, n, guidance)
    return [translator.translation(pieces, hypothesis) for hypothesis in found], steps


def _target(translator: Translator, target: str | Sequence[str]) -> tuple[list[int], list[str]]:
    """Token ids and pieces of a translation, </s> last."""
    tokenizer, limit = translator.tokenizers.target, translator.search.max_source_length
    if isinstance(target, str):
        (ids,), (pieces,) = tokenizer.encode([target]), tokenizer.surfaces([target])
        _check_target(len(ids), limit)
        return ids, pieces
    pieces = list(target)
    if pieces[-1:] == ["</s>"]:
        pieces.pop()
    _check_target(len(pieces) + 1, limit)
    return [*prefix_tokens(tokenizer, pieces, "target"), tokenizer.eos], [*pieces, "</s>"]


def _check_target(tokens: int, limit: int) -> None:
    """Raises UserError for more tokens, </s> among them, than search.max_source_length."""
    if tokens > limit:
        raise UserError(f"target: has {tokens} tokens, but search.max_source_length={limit}")
