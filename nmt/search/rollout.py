"""Greedy search and sampling: one hypothesis per row, token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nmt.search.hypothesis import Ending, History, Hypothesis, LengthPenalty, Limits, StateT, Step, Symbols
from nmt.search.log_probs import LogProbs


@torch.no_grad()
def rollout(
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    choose: Callable[[Tensor], Tensor],
    penalty: LengthPenalty,
    device: torch.device,
) -> list[Hypothesis]:
    """One hypothesis for each row of the state; `choose`: log-probabilities `(N, V)` -> tokens `(N,)` int64.

    Finished rows leave the batch.
    """
    normalise = LogProbs(symbols, limits.min_length, device)
    history = History(symbols.eos)
    growing = list(range(len(limits.max_lengths)))
    lasts = [(0, 0)] * len(growing)  # per row of the first step: the step at which it ended, and its row there
    totals = torch.zeros(len(growing), device=device)
    origin = torch.arange(len(growing), device=device)
    tokens = torch.full((len(growing),), symbols.bos, device=device)
    for now in range(max(limits.max_lengths, default=0)):
        output = step(tokens, state)
        history.attend(output.weights)
        at_max = [now + 1 >= limits.max_lengths[row] for row in growing]
        log_probs = normalise(output.logits, now + 1, at_max)
        tokens = choose(log_probs)
        totals.index_add_(0, origin, log_probs.gather(1, tokens[:, None]).squeeze(1))
        chosen = tokens.cpu().tolist()  # the step's one synchronisation
        going = []
        for row, token in enumerate(chosen):
            if token == symbols.eos or at_max[row]:
                lasts[growing[row]] = (now, row)
            else:
                going.append(row)
        if not going:
            break
        state = output.state
        if len(going) < len(growing):
            index = torch.tensor(going).to(device, non_blocking=True)
            state, tokens, origin = state.select(index), tokens[index], origin[index]
        history.advance(going, [chosen[row] for row in going])
        growing = [growing[row] for row in going]
    endings = [
        Ending(last, row, log_prob, log_prob / penalty(last + 1))
        for (last, row), log_prob in zip(lasts, totals.cpu().tolist(), strict=True)
    ]
    return history.hypotheses([endings])[0]


def greedy_search(
    step: Step[StateT],
    state: StateT,
    symbols: Symbols,
    limits: Limits,
    *,
    penalty: LengthPenalty,
    device: torch.device,
) -> list[list[Hypothesis]]:
    """A list with one hypothesis for each sentence, from a state with one row per sentence."""
    rows = rollout(step, state, symbols, limits, choose=_most_probable, penalty=penalty, device=device)
    return [[hypothesis] for hypothesis in rows]


def _most_probable(log_probs: Tensor) -> Tensor:
    return log_probs.argmax(-1)


@dataclass(frozen=True)
class SamplingOptions:
    """What to draw from: the `top_k` most probable tokens (0: all), of these the nucleus of mass `top_p`.

    The nucleus (Holtzman et al. 2020) is the smallest set of most probable tokens that together reach
    `top_p` (1: all), measured after the logits were divided by the temperature. Raises ValueError.
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
    generator: torch.Generator | None,
    penalty: LengthPenalty,
    device: torch.device,
) -> list[list[Hypothesis]]:
    """`options.n_samples` hypotheses for each sentence, best first, from a state with one row per sentence.

    Draws are independent, so hypotheses may repeat. Their log-probabilities are the model's own, at
    temperature 1 and with all tokens. The generator must be on `device`; None: torch's global one.
    """
    n = options.n_samples
    sentences = torch.arange(len(limits.max_lengths), device=device)
    rows = rollout(
        step,
        state.select(sentences.repeat_interleave(n)),
        symbols,
        Limits(limits.min_length, [length for length in limits.max_lengths for _ in range(n)]),
        choose=partial(_draw, options=options, generator=generator),
        penalty=penalty,
        device=device,
    )
    groups = [rows[start : start + n] for start in range(0, len(rows), n)]
    return [sorted(group, key=lambda hypothesis: -hypothesis.score) for group in groups]


def _draw(log_probs: Tensor, options: SamplingOptions, generator: torch.Generator | None) -> Tensor:
    """(N, V) -> (N,) int64, one draw per row."""
    # A sum in float32 loses tokens of probability 1e-8. (MPS has no float64.)
    device = log_probs.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    uniform = torch.rand(len(log_probs), 1, dtype=wide, device=device, generator=generator)
    if options.top_k == 0 and options.top_p == 1:
        return _inverse_cdf(log_probs, options.temperature, uniform)
    size = log_probs.shape[1]
    candidates, tokens = log_probs.topk(min(options.top_k or size, size))
    if options.top_p < 1:
        candidates = _nucleus(candidates, options)
    drawn = _inverse_cdf(candidates, options.temperature, uniform)
    return tokens.gather(1, drawn[:, None]).squeeze(1)


def _nucleus(candidates: Tensor, options: SamplingOptions) -> Tensor:
    """(N, C) sorted, best first -> the same with -inf outside the nucleus."""
    # Relative to the best, so that no temperature is small enough to turn all of them to -inf.
    probs = ((candidates - candidates[:, :1]) / options.temperature).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    return candidates.masked_fill(mass_before >= options.top_p, -torch.inf)


def _inverse_cdf(log_probs: Tensor, temperature: float, uniform: Tensor) -> Tensor:
    """(N, C), (N, 1) in [0, 1) -> (N,): the draw from softmax(log_probs / temperature) at these points of its CDF.

    Unlike torch.multinomial, this never waits for the device.
    """
    best, first = log_probs.max(-1, keepdim=True)
    # Relative to the best, so that no temperature is small enough to turn all of them to 0.
    cdf = (log_probs - best).div_(temperature).exp_().cumsum(-1, dtype=uniform.dtype)
    # The first to exceed u times the sum: never of probability 0, and always there, as the product rounds to less.
    drawn = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    # With NaN there is none: of a model without probabilities, or a temperature that is 0 in float32.
    return torch.where(drawn < cdf.shape[1], drawn, first).squeeze(1)
