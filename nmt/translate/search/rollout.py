"""Greedy search and sampling: one token at a time, without alternatives.

Shapes: N active rows, V vocabulary, C candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nmt.model.state import StateT, Step
from nmt.translate.search.forbidden import Forbidden, Watch
from nmt.translate.search.hypothesis import Ending, History, Hypothesis, LengthPenalty, Limits, Symbols
from nmt.translate.search.log_probs import LogProbs

Choose = Callable[[Tensor, Tensor], Tensor]
Uniform = Callable[[Tensor], Tensor]
"""int64 row numbers (N,) -> (N,) in [0, 1), other numbers at each call. In float64 where the device has it: sums in
float32 would lose tokens of probability 1e-8."""


def greedy_search(
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    penalty: LengthPenalty,
    device: torch.device,
    forbidden: Forbidden | None = None,
) -> list[list[Hypothesis]]:
    """The most probable token at every step: a list with one hypothesis per sentence (row of the state).

    forbidden: phrases that no hypothesis may contain; those of one token are in symbols.banned.
    """

    def choose(log_probs: Tensor, _: Tensor) -> Tensor:
        return log_probs.argmax(-1)

    rows = _rollout(step, state, symbols, limits, choose=choose, penalty=penalty, device=device, forbidden=forbidden)
    return [[hypothesis] for hypothesis in rows]


@dataclass(frozen=True)
class SamplingOptions:
    """Temperature, then truncation to the `top_k` most probable tokens (0: all), then to the nucleus `top_p` of these.

    The nucleus (Holtzman et al. 2020) is the smallest set of most probable tokens with a total probability of at least
    `top_p` (1: all). Raises ValueError for values out of range.
    """

    temperature: float
    top_k: int
    top_p: float
    n_samples: int

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}, but must be above 0 (or use greedy search)")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, but must be at least 0 (0 to keep all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (1 to keep all tokens)")
        if self.n_samples < 1:
            raise ValueError(f"n_samples is {self.n_samples}, but must be at least 1")


def sample(
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    options: SamplingOptions,
    uniform: Uniform,
    penalty: LengthPenalty,
    device: torch.device,
    forbidden: Forbidden | None = None,
) -> list[list[Hypothesis]]:
    """`options.n_samples` independent hypotheses per sentence (row of the state), best first; they may repeat.

    Their log-probabilities are the model's own: at temperature 1, without truncation. Sample j of sentence i is drawn
    in row i * n_samples + j. forbidden: as in `greedy_search`.
    """
    n = options.n_samples
    sentences = torch.arange(len(limits.max_lengths), device=device)
    rows = _rollout(
        step,
        state.select(sentences.repeat_interleave(n)),
        symbols,
        limits.repeated(n),
        choose=lambda log_probs, rows: _draw(log_probs, uniform(rows), options),
        penalty=penalty,
        device=device,
        forbidden=forbidden,
    )
    groups = [rows[start : start + n] for start in range(0, len(rows), n)]
    return [sorted(group, key=lambda hypothesis: -hypothesis.score) for group in groups]


@torch.no_grad()
def _rollout(
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    choose: Choose,
    penalty: LengthPenalty,
    device: torch.device,
    forbidden: Forbidden | None,
) -> list[Hypothesis]:
    """One hypothesis per row of the state; `choose` maps log-probabilities (N, V) and row numbers (N,) to tokens (N,).

    Finished rows leave the batch.
    """
    normalise = LogProbs(symbols, limits.min_length, device)
    history = History(symbols.eos)
    active = list(range(len(limits.max_lengths)))
    watch = None if forbidden is None else Watch(forbidden, len(active))
    last = [(0, 0)] * len(active)  # step and row at which each hypothesis ended
    totals = torch.zeros(len(active), device=device)
    origin = torch.arange(len(active), device=device)  # `active` on the device
    tokens = torch.full((len(active),), symbols.bos, device=device)
    for now in range(max(limits.max_lengths, default=0)):
        output = step(tokens, state)
        history.add(totals[origin], output.weights)
        forced = [limits.forced(now, row, symbols.eos) for row in active]
        log_probs = normalise(output.logits, now + 1, forced, None if watch is None else watch.bans())
        tokens = choose(log_probs, origin)
        totals.index_add_(0, origin, log_probs.gather(1, tokens[:, None]).squeeze(1))
        chosen = tokens.cpu().tolist()  # the only synchronisation of a step
        unfinished = []
        for row, token in enumerate(chosen):
            if symbols.eos in {token, forced[row]}:
                last[active[row]] = (now, row)
            else:
                unfinished.append(row)
        if not unfinished:
            break
        state = output.state
        if len(unfinished) < len(active):
            index = torch.tensor(unfinished).to(device, non_blocking=True)
            state, tokens, origin = state.select(index), tokens[index], origin[index]
        following = [chosen[row] for row in unfinished]
        history.advance(unfinished, following)
        if watch is not None:
            watch.advance(unfinished, following)
        active = [active[row] for row in unfinished]
    endings = [
        Ending(now, row, log_prob, log_prob / penalty(now + 1))
        for (now, row), log_prob in zip(last, totals.cpu().tolist(), strict=True)
    ]
    return history.hypotheses([endings])[0]


def _draw(log_probs: Tensor, uniform: Tensor, options: SamplingOptions) -> Tensor:
    """(N, V), (N,) in [0, 1) -> int64 (N,), one draw per row."""
    uniform = uniform[:, None]
    if options.top_k == 0 and options.top_p == 1:
        return _inverse_cdf(log_probs, options.temperature, uniform)
    size = log_probs.shape[1]
    candidates, tokens = log_probs.topk(min(options.top_k or size, size))
    if options.top_p < 1:
        # Differences from the best do not overflow, however small the temperature.
        probs = ((candidates - candidates[:, :1]) / options.temperature).softmax(-1)
        mass_before = probs.cumsum(-1) - probs
        candidates = candidates.masked_fill(mass_before >= options.top_p, -torch.inf)
    drawn = _inverse_cdf(candidates, options.temperature, uniform)
    return tokens.gather(1, drawn[:, None]).squeeze(1)


def _inverse_cdf(log_probs: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """(N, C), (N, 1) in [0, 1) -> (N,): draws from softmax(log_probs / temperature) by inverse transform sampling.

    Unlike torch.multinomial, this does not synchronise with the device.
    """
    best, argmax = log_probs.max(-1, keepdim=True)
    # Differences from the best do not all underflow, however small the temperature.
    cdf = (log_probs - best).div_(temperature).exp_().cumsum(-1, dtype=uniform.dtype)
    # The first entry above u times the sum has a probability above 0, and exists because u < 1.
    drawn = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    # No entry exists if the CDF is NaN: the model's output is not finite, or the temperature is 0 in float32.
    return torch.where(drawn < cdf.shape[1], drawn, argmax).squeeze(1)
