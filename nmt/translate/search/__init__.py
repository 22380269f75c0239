"""Greedy and beam search, sampling, minimum Bayes risk, and what constrains them."""
