"""From the settings of a search to the search: which one it is, how wide, and how it ranks hypotheses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmt.config import schema
from nmt.ops.sentence_draws import sampling_draws
from nmt.translate.search.beam import beam_search
from nmt.translate.search.coverage import Coverage, CoverageScore
from nmt.translate.search.diverse import Groups
from nmt.translate.search.hypothesis import NO_PENALTY, Hypothesis, LengthPenalty
from nmt.translate.search.rollout import SamplingOptions, greedy_search, sample


def beam_size(settings: schema.Search) -> int:
    """Hypotheses of a sentence in a beam; 1 for other searches."""
    match settings:
        case schema.Beam():
            return settings.beam_size
        case schema.MinimumBayesRisk(candidates="beam"):
            return settings.n_candidates
    return 1


def width(settings: schema.Search, n: int = 1) -> int:
    """Hypotheses of a sentence at each step of a search for the n best translations."""
    match settings:
        case schema.MinimumBayesRisk():
            return settings.n_candidates
        case schema.Sampling():
            return n
    return beam_size(settings)


def length_penalty(settings: schema.Search) -> LengthPenalty:
    """The length penalty by which the search divides log-probabilities."""
    return LengthPenalty(settings.length_penalty, settings.alpha) if isinstance(settings, schema.Beam) else NO_PENALTY


def coverage_score(settings: schema.Beam) -> CoverageScore:
    """The score that a beam search adds to those of finished hypotheses."""
    return CoverageScore(settings.coverage_penalty, settings.coverage_floor, settings.coverage_cap)


def score(settings: schema.Search, log_prob: float, length: int, attention: Tensor | None) -> float:
    """The score by which the search ranks a hypothesis of this log-probability, length and attention (T, S)."""
    normalised = log_prob / length_penalty(settings)(length)
    if not isinstance(settings, schema.Beam) or not settings.coverage_penalty or attention is None:
        return normalised
    return normalised + coverage_score(settings)(attention.sum(0).numpy())


def run_search(
    settings: schema.Search,
    inputs: Any,  # noqa: ANN401
    n: int,
    lengths: Sequence[int],
    keys: Tensor,
    device: torch.device,
    *,
    of_beams: dict[str, Any],
    **options: Any,  # noqa: ANN401
) -> list[list[Hypothesis]]:
    """The n best hypotheses of sentences with these numbers of source tokens, or all candidates of search=mbr.

    inputs: step, state, symbols and limits; keys: of draws, int64 (B,); of_beams: further options of a beam search;
    options: of all searches.
    """
    options |= {"penalty": length_penalty(settings), "device": device}
    match settings:
        case schema.Greedy():
            return greedy_search(*inputs, **options)
        case schema.Beam():
            options |= {"beam_size": settings.beam_size, "n_best": n, "stop": settings.stop, **of_beams}
            if settings.coverage_penalty:
                options["coverage"] = Coverage(coverage_score(settings), lengths)
            if settings.groups > 1:
                options["groups"] = Groups(settings.groups, settings.diversity, settings.beam_size)
            return beam_search(*inputs, **options)
        case schema.MinimumBayesRisk(candidates="beam", n_candidates=size):
            return beam_search(*inputs, beam_size=size, n_best=size, **options)
        case schema.Sampling() | schema.MinimumBayesRisk():
            samples = settings.n_candidates if isinstance(settings, schema.MinimumBayesRisk) else n
            sampling = SamplingOptions(settings.temperature, settings.top_k, settings.top_p, samples)
            return sample(*inputs, options=sampling, uniform=sampling_draws(keys, samples, device), **options)
