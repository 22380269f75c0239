"""Sentences to translations.

Begin with `translator.py`, the Python API. It encodes lines, makes batches, has `prepared_model.py` prepare the model,
and chooses the search. `guidance.py` encodes what a user decides besides the search.

`search.py` has what all searches share. `beam.py` is beam search with all that attaches to it, `sampling.py` greedy
search, sampling and minimum Bayes risk. `phrases.py` holds constraints and forbidden phrases, `shortlist.py` the tokens
that a search may use. `heatmap.py` draws attention.
"""
