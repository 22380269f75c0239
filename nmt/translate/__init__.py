"""Translates sentences.

Begin with `translator.py`, the Python API. It encodes lines, makes batches, and builds the search method.
`prepared_model.py` prepares the model for search. `guidance.py` encodes prefixes, constraints and other controls.

`search.py` has what all search methods share; `make_search` in `translator.py` chooses the method. CONTRIBUTING.md
shows in five steps how to add a method. `beam.py` has beam search, `sampling.py` greedy search, sampling and minimum
Bayes risk. `phrases.py` has constraints and forbidden phrases, `shortlist.py` the tokens that a search may use.
`heatmap.py` draws attention.
"""
