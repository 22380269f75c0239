"""Translates sentences. Each file imports only files that stand above it in this list.

- `similarity.py`, `heatmap.py` and `search_model.py` import no other file of this subpackage. They have the utilities
  of minimum Bayes risk, pictures of attention, and a form of a model that is fast in a search.
- `translation.py` is one translation. `forbidden.py` finds the tokens that would complete a forbidden phrase.
- `search.py` has what a search method gets and returns, `steps.py` what all methods do at each step. `shortlist.py`
  limits a search to some tokens.
- `selection.py` scores the hypotheses of a beam and chooses among them, `constraints.py` so that they meet phrases.
  `beam.py` has beam search; `sampling.py` has greedy search, sampling and minimum Bayes risk, and the table of all
  searches. CONTRIBUTING.md shows in five steps how to add a search.
- `guidance.py` encodes prefixes, constraints and other controls.
- `translator.py` is the Python API. Begin with it: it encodes lines, makes batches, and searches them.
"""
