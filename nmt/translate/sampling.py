"""Greedy search, sampling and minimum Bayes risk decoding, and the table of all searches. `rollout` extends each
hypothesis on its own, without a beam.

Shapes: N active rows, V' padded vocabulary, C candidates for the next token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nmt.config.errors import UserError
from nmt.config.schema import training as schema
from nmt.model.seq2seq import StateT
from nmt.ops.draws import sampling_draws
from nmt.translate.beam import BeamSearch, beam_search
from nmt.translate.search import Hypothesis, Search, SearchBatch
from nmt.translate.selection import Scorer, Selection
from nmt.translate.similarity import mean_utilities
from nmt.translate.steps import Ending, History, LogProbs, Mask, watches
from nmt.translate.translation import Translation


class GreedySearch(Search[schema.Greedy]):
    """Takes the most probable token at every step."""

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        return [[hypothesis] for hypothesis in rollout(batch, lambda log_probs, _: log_probs.argmax(-1))]

    def check_nbest(self, n: int) -> None:
        if n > 1:
            raise UserError(f"nbest={n}: greedy search returns one; use search=beam search.beam_size={n}")


class Sampling(Search[schema.Sampling]):
    """Draws each token from the model's distribution, or from its most probable tokens."""

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        return sample(batch, n, make_draw(self.settings))

    def width(self, n: int) -> int:
        return n


class MinimumBayesRisk(Search[schema.MinimumBayesRisk]):
    """Finds candidate translations, and chooses the one most similar to the others (Eikema and Aziz 2020)."""

    def __init__(self, settings: schema.MinimumBayesRisk) -> None:
        super().__init__(settings)
        self.beam_size = settings.n_candidates if settings.candidates == "beam" else 1

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        """Return all candidates of each sentence. `best` then chooses the n best."""
        if self.settings.candidates == "beam":
            selection = Selection(self.beam_size, batch.symbols.eos)
            return beam_search(batch, selection, self.beam_size, scorer=Scorer())
        return sample(batch, self.settings.n_candidates, make_draw(self.settings))

    def width(self, n: int) -> int:
        return self.settings.n_candidates

    def check_nbest(self, n: int) -> None:
        size = self.settings.n_candidates
        if n > size:
            raise UserError(f"nbest={n}: more than search.n_candidates={size}; set search.n_candidates={n}")

    def best(self, candidates: list[Translation], n: int) -> list[Translation]:
        """Choose the n distinct candidates with the greatest mean similarity to the others. This mean becomes their
        score."""
        utilities = mean_utilities([candidate.text for candidate in candidates], self.settings.utility)
        scored: dict[str, Translation] = {}  # by text, as samples may repeat a translation
        for candidate, score in zip(candidates, utilities, strict=True):
            scored.setdefault(candidate.text, replace(candidate, score=score))
        return sorted(scored.values(), key=lambda candidate: -candidate.score)[:n]


Choose = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities (N, V'), index of each row in the batch (N,) -> the next token of each row, int64 (N,)."""
Draw = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities (N, V'), random numbers (N,) in [0, 1) -> the next token of each row, int64 (N,). The random
numbers are float64 where the device has it, because sums in float32 would lose tokens of probability 1e-8."""


def sample(batch: SearchBatch[StateT], n: int, draw: Draw) -> list[list[Hypothesis]]:
    """Draw n independent hypotheses of each sentence, best first; they may repeat. Their log-probabilities are the
    model's, at temperature 1 and without truncation. Sample j of sentence i is drawn in row i * n + j."""
    assert batch.keys is not None
    uniform = sampling_draws(batch.keys(), n, batch.device)
    rows = rollout(batch.repeated(n), lambda log_probs, numbers: draw(log_probs, uniform(numbers)))
    samples = [rows[start : start + n] for start in range(0, len(rows), n)]
    return [sorted(of_sentence, key=lambda hypothesis: -hypothesis.score) for of_sentence in samples]


@torch.no_grad()
def rollout(batch: SearchBatch[StateT], choose: Choose) -> list[Hypothesis]:
    """Extend one hypothesis of each sentence by the tokens that `choose` returns, until all have ended."""
    eos, device = batch.symbols.eos, batch.device
    active = list(range(len(batch.limits.max_lengths)))
    next_log_probs, history = LogProbs(batch.symbols, device), History(batch)
    followers = [history, *watches(batch)]
    last = [(0, 0)] * len(active)  # step and row at which each hypothesis ended
    totals = torch.zeros(len(active), device=device)
    origin = torch.arange(len(active), device=device)  # index of each row in the batch: `active` on the device
    tokens = torch.full((len(active),), batch.symbols.bos, device=device)
    state = batch.state
    for now in range(max(batch.limits.max_lengths, default=0)):
        output = batch.step(tokens, state)
        history.add(totals[origin], output.weights)
        mask = Mask.of(batch, now, active, 1, followers)
        log_probs = next_log_probs(output.logits, mask)
        tokens = choose(log_probs, origin)
        totals.index_add_(0, origin, log_probs.gather(1, tokens[:, None]).squeeze(1))
        chosen = tokens.cpu().tolist()  # the only synchronisation of a step
        unfinished = []
        for row, token in enumerate(chosen):
            if eos in {token, mask.forced[row]}:
                last[active[row]] = (now, row)
            else:
                unfinished.append(row)
        if not unfinished:
            break
        state = output.state
        if len(unfinished) < len(active):
            index = torch.tensor(unfinished).to(device, non_blocking=True)
            state, tokens, origin = state.select(index), tokens[index], origin[index]
        for follower in followers:
            follower.advance(unfinished, [chosen[row] for row in unfinished])
        active = [active[row] for row in unfinished]
    ends = zip(last, totals.cpu().tolist(), strict=True)
    return history.hypotheses([[Ending(*end, log_prob, log_prob) for end, log_prob in ends]])[0]


def make_draw(settings: schema.Sampling | schema.MinimumBayesRisk) -> Draw:
    """Make a function that draws at a temperature from the `top_k` most probable tokens (0: from all), and of these
    only from the nucleus, the smallest set with a total probability of at least `top_p` (Holtzman et al. 2020)."""
    temperature, top_k, top_p = settings.temperature, settings.top_k, settings.top_p

    def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
        if top_k == 0 and top_p == 1:
            return inverse_cdf(log_probs, temperature, uniform)
        size = log_probs.shape[1]
        candidates, tokens = log_probs.topk(min(top_k or size, size))
        if top_p < 1:
            # Log-probabilities relative to the best do not overflow, however small the temperature.
            probs = ((candidates - candidates[:, :1]) / temperature).softmax(-1)
            mass_before = probs.cumsum(-1) - probs
            candidates = candidates.masked_fill(mass_before >= top_p, -torch.inf)
        drawn = inverse_cdf(candidates, temperature, uniform)
        return tokens.gather(1, drawn[:, None]).squeeze(1)

    return draw


def inverse_cdf(log_probs: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """Draw from softmax(log_probs / temperature) by inverse transform sampling: (N, C), (N,) in [0, 1) -> (N,). Unlike
    torch.multinomial, this does not synchronise with the device."""
    best, argmax = log_probs.max(-1, keepdim=True)
    # Relative to the best, one log-probability is 0, so that not all underflow, however small the temperature.
    cdf = (log_probs - best).div_(temperature).exp_().cumsum(-1, dtype=uniform.dtype)
    # Draw the first candidate whose cumulative sum exceeds `uniform` times the total: its probability is above 0. There
    # is one because uniform < 1.
    drawn = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    # Where the CDF is NaN, take the most probable candidate: the logits are not finite, or the temperature is 0 in
    # float32.
    return torch.where(drawn < cdf.shape[1], drawn, argmax).squeeze(1)


def make_search(settings: schema.SearchLimits) -> Search[Any]:
    """Make the search method of a section `search`."""
    searches: dict[type[schema.SearchLimits], type[Search[Any]]] = {
        schema.Beam: BeamSearch,
        schema.Greedy: GreedySearch,
        schema.Sampling: Sampling,
        schema.MinimumBayesRisk: MinimumBayesRisk,
    }
    return searches[type(settings)](settings)
