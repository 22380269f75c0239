"""Scores, windows, normalizers, alignments, coverage and heads: the parts that combine freely.

Begin with `attention.py`, which joins the parts. Each of `scores.py`, `normalizers.py` and `alignment.py` starts with
the interface of its part. A score of your own: CONTRIBUTING.md.
"""
