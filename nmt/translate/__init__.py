"""Sentences to translations.

Begin with `translator.py`, the Python API. It encodes lines, and `guidance.py` what a user decides besides the search;
`searcher.py` makes batches, has `prepared_model.py` prepare the model, and chooses the search.

`search.py` has what all searches share. `beam.py` is the loop of beam search, and `beam_variants.py` what attaches to
it; `sampling.py` has greedy search, sampling and minimum Bayes risk. `phrases.py` holds constraints and forbidden
phrases, `shortlist.py` the tokens that a search may use.
"""
