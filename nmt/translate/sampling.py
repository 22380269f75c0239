"""Searches that extend hypotheses one token at a time, without a beam: greedy search, sampling, and minimum Bayes risk
decoding of samples.

Shapes: N active rows, V vocabulary, C candidates; of texts: N texts, V distinct n-grams of one order.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.model.decoder import StateT
from nmt.ops.draws import sampling_draws
from nmt.translate.beam import Scorer, Selection, beam_search
from nmt.translate.search import Ending, History, Hypothesis, LogProbs, Mask, Search, SearchBatch

if TYPE_CHECKING:
    from nmt.translate.translator import Translation

Utility = Literal["chrf", "bleu"]
Matrix = NDArray[np.float64]
CHARACTER_ORDERS, WORD_ORDERS = range(1, 7), range(1, 5)
BETA = 2  # weight of recall in chrF


class GreedySearch(Search[schema.Greedy]):
    """Takes the most probable token at every step."""

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        return [[hypothesis] for hypothesis in rollout(batch, lambda log_probs, _: log_probs.argmax(-1))]

    def check_nbest(self, n: int) -> None:
        if n > 1:
            raise UserError(f"nbest={n}: greedy search returns one; use search=beam search.beam_size={n}")


class Sampling(Search[schema.Sampling]):
    """Draws each token from the model's distribution, or from a part of it."""

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        return sample(batch, n, drawn_by(self.settings))

    def width(self, n: int) -> int:
        return n


class MinimumBayesRisk(Search[schema.MinimumBayesRisk]):
    """Chooses, of several candidates, the one most similar to the others (Eikema and Aziz 2020)."""

    def __init__(self, settings: schema.MinimumBayesRisk) -> None:
        super().__init__(settings)
        self.beam_size = settings.n_candidates if settings.candidates == "beam" else 1

    def __call__(self, batch: SearchBatch[Any], n: int) -> list[list[Hypothesis]]:
        """Return all candidates, of which `best` chooses."""
        if self.settings.candidates == "beam":
            selection = Selection(self.beam_size, batch.symbols.eos)
            return beam_search(batch, selection, self.beam_size, scorer=Scorer())
        return sample(batch, self.settings.n_candidates, drawn_by(self.settings))

    def width(self, n: int) -> int:
        return self.settings.n_candidates

    def check_nbest(self, n: int) -> None:
        size = self.settings.n_candidates
        if n > size:
            raise UserError(f"nbest={n}: more than the {size} candidates; set search.n_candidates={n}")

    def best(self, candidates: "list[Translation]", n: int) -> "list[Translation]":
        """Choose the n distinct candidates of the greatest mean similarity, which becomes their score."""
        utilities = mean_utilities([candidate.text for candidate in candidates], self.settings.utility)
        scored: dict[str, Translation] = {}  # by text: samples may repeat a translation
        for candidate, score in zip(candidates, utilities, strict=True):
            scored.setdefault(candidate.text, replace(candidate, score=score))
        return sorted(scored.values(), key=lambda candidate: -candidate.score)[:n]


Choose = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities (N, V), and the numbers of the rows (N,) in the batch -> int64 (N,), the next tokens."""
Draw = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities (N, V), and (N,) in [0, 1) -> int64 (N,), a token for each row. The numbers have float64 where the
device has it: sums in float32 would lose tokens of probability 1e-8."""


def sample(batch: SearchBatch[StateT], n: int, draw: Draw) -> list[list[Hypothesis]]:
    """Draw n independent hypotheses of each sentence, best first; they may repeat.

    Their log-probabilities are the model's own: at temperature 1, without truncation. Sample j of sentence i is drawn
    in row i * n + j.
    """
    assert batch.keys is not None
    uniform = sampling_draws(batch.keys, n, batch.device)
    rows = rollout(batch.repeated(n), lambda log_probs, numbers: draw(log_probs, uniform(numbers)))
    samples = [rows[start : start + n] for start in range(0, len(rows), n)]
    return [sorted(of_sentence, key=lambda hypothesis: -hypothesis.score) for of_sentence in samples]


@torch.no_grad()
def rollout(batch: SearchBatch[StateT], choose: Choose) -> list[Hypothesis]:
    """Extend one hypothesis of each sentence by the tokens that `choose` returns. Finished rows leave the batch."""
    eos, device = batch.symbols.eos, batch.device
    active = list(range(len(batch.limits.max_lengths)))
    next_log_probs, history = LogProbs(batch.symbols, device), History(batch)
    followers = [history, *(make(len(active)) for make in batch.rules)]
    last = [(0, 0)] * len(active)  # step and row at which each hypothesis ended
    totals = torch.zeros(len(active), device=device)
    origin = torch.arange(len(active), device=device)  # `active` on the device
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
    endings = [
        Ending(now, row, log_prob, log_prob) for (now, row), log_prob in zip(last, totals.cpu().tolist(), strict=True)
    ]
    return history.hypotheses([endings])[0]


def drawn_by(settings: schema.Sampling | schema.MinimumBayesRisk) -> Draw:
    """Draw at a temperature, from the `top_k` most probable tokens (0: all), and of these from the nucleus `top_p`:
    the smallest set of most probable tokens with a total probability of at least `top_p` (Holtzman et al. 2020)."""
    temperature, top_k, top_p = settings.temperature, settings.top_k, settings.top_p

    def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
        if top_k == 0 and top_p == 1:
            return inverse_cdf(log_probs, temperature, uniform)
        size = log_probs.shape[1]
        candidates, tokens = log_probs.topk(min(top_k or size, size))
        if top_p < 1:
            # Differences from the best do not overflow, however small the temperature.
            probs = ((candidates - candidates[:, :1]) / temperature).softmax(-1)
            mass_before = probs.cumsum(-1) - probs
            candidates = candidates.masked_fill(mass_before >= top_p, -torch.inf)
        drawn = inverse_cdf(candidates, temperature, uniform)
        return tokens.gather(1, drawn[:, None]).squeeze(1)

    return draw


def inverse_cdf(log_probs: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """(N, C), (N,) in [0, 1) -> (N,): draws from softmax(log_probs / temperature) by inverse transform sampling.

    Unlike torch.multinomial, this does not synchronise with the device.
    """
    best, argmax = log_probs.max(-1, keepdim=True)
    # Differences from the best do not all underflow, however small the temperature.
    cdf = (log_probs - best).div_(temperature).exp_().cumsum(-1, dtype=uniform.dtype)
    # The first entry above u times the sum has a probability above 0, and exists because u < 1.
    drawn = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
    # No entry exists if the CDF is NaN: the model's output is not finite, or the temperature is 0 in float32.
    return torch.where(drawn < cdf.shape[1], drawn, argmax).squeeze(1)


def mean_utilities(texts: Sequence[str], utility: Utility) -> list[float]:
    """Compute the mean similarity of each text, as a hypothesis, to every other one as a reference, from 0 to 100. A
    text that is alone has 100."""
    if len(texts) <= 1:
        return [100.0] * len(texts)
    texts = [normalize("NFC", text) for text in texts]
    counts = Counter(texts)
    of_pairs = pairwise_similarities(list(counts), utility)
    times = np.array(list(counts.values()))
    # Rounded, so that the order of a sum does not choose between equal ones.
    means = ((of_pairs @ times - of_pairs.diagonal()) / (len(texts) - 1)).round(6)
    by_text = dict(zip(counts, means.tolist(), strict=True))
    return [by_text[text] for text in texts]


def pairwise_similarities(texts: Sequence[str], utility: Utility) -> Matrix:
    """Compute sacreBLEU's sentence score of each text (row) with each (column) as its reference: (N, N), 0 to 100.

    chrf: character 6-grams without spaces (Popović 2015). bleu: tokenizer 13a, exponential smoothing, effective order.
    """
    if utility == "chrf":
        return _chrf(["".join(text.split()) for text in texts])
    from sacrebleu.metrics.bleu import BLEU  # takes long to load, and few searches need it

    tokenise: Callable[[str], str] = BLEU(tokenize="13a").tokenizer
    return _bleu([tokenise(text.rstrip()).split() for text in texts])


def _chrf(texts: Sequence[str]) -> Matrix:
    """F score of the mean precision and recall over all orders that both texts have."""
    n = len(texts)
    precision, recall, orders = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    for order in CHARACTER_ORDERS:
        matches, totals = _matches(texts, order)
        both = (totals[:, None] > 0) & (totals > 0)
        orders += both
        precision += matches / np.maximum(totals[:, None], 1)
        recall += matches / np.maximum(totals, 1)
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    below = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(below > 0, below, 1)


def _bleu(texts: Sequence[Sequence[str]]) -> Matrix:
    """Geometric mean of the precisions up to the hypothesis's length, times the brevity penalty."""
    n, lengths = len(texts), np.array([len(text) for text in texts])
    logarithms, orders, smoothing, matched = np.zeros((n, n)), np.zeros((n, 1)), np.ones((n, n)), np.zeros((n, n))
    for order in WORD_ORDERS:
        matches, totals = _matches(texts, order)
        possible = totals[:, None] > 0
        smoothing = np.where(possible & (matches == 0), smoothing / 2, smoothing)
        counted = np.where(matches > 0, matches, smoothing) / np.maximum(totals[:, None], 1)
        logarithms += np.where(possible, np.log(counted), 0.0)
        orders, matched = orders + possible, matched + matches
    brevity = np.minimum(0.0, 1 - lengths / np.maximum(lengths[:, None], 1))
    return np.where(matched > 0, 100 * np.exp(brevity + logarithms / np.maximum(orders, 1)), 0.0)


def _matches(texts: Sequence[Sequence[Hashable]], order: int) -> tuple[Matrix, NDArray[np.int64]]:
    """Count the n-grams that each text shares with each other one, (N, N), and those that it has, (N,)."""
    counters = [Counter(zip(*(text[start:] for start in range(order)), strict=False)) for text in texts]
    columns = {gram: i for i, gram in enumerate(dict.fromkeys(gram for counter in counters for gram in counter))}
    counts = np.zeros((len(texts), len(columns)), np.int32)
    for row, counter in zip(counts, counters, strict=True):
        row[[columns[gram] for gram in counter]] = list(counter.values())
    matches = np.array([np.minimum(counts, row).sum(1) for row in counts], np.float64)
    return matches, counts.sum(1, dtype=np.int64)
