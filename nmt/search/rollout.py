"""One hypothesis per row, token by token, without looking back: what greedy search and sampling share.

Shapes: N rows still growing, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nmt.search.history import Ending, History
from nmt.search.hypothesis import Hypothesis, LengthPenalty, Limits, StateT, Step, Symbols
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
