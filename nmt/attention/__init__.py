"""Scores, windows, normalizers, alignments, coverage and heads: the parts that combine freely.

Begin with `attention.py`, which joins the parts. Each of `scores.py`, `normalizers.py` and `alignment.py` starts with
the interface of its part; `memory.py` has the types that they exchange. `build.py` makes an attention from a
configuration. A score of your own: CONTRIBUTING.md.
"""
