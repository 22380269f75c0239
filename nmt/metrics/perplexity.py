"""Perplexity."""

import math


def perplexity(nll: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood; infinity where it does not fit a float."""
    try:
        return math.exp(nll / max(1, tokens))
    except OverflowError:
        return math.inf
