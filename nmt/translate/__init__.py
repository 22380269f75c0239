"""Sentences to translations.

Begin with `translator.py`, the Python API. `searcher.py` makes batches and runs a search of `search/` on
`prepared_model.py`, the model with its tables ready; `guidance.py` and `terminology.py` steer it and constrain it.
"""
