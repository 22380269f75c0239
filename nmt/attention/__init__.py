"""Scores, windows, normalizers, alignments, coverage and heads: the parts that combine freely.

Begin with `parts.py`, the interface of each part, then `attention.py`, which joins them; `memory.py` has the types
that they exchange. `build.py` makes an attention from a configuration. A score of your own: CONTRIBUTING.md.
"""
