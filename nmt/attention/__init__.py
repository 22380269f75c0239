"""Attention, composed of parts that combine freely: scores, windows, normalizers, alignments, coverage and heads.

Begin with `attention.py`, which joins the parts. Each of `scores.py`, `windows.py`, `normalizers.py` and `alignment.py`
starts with the interface of its part. CONTRIBUTING.md shows how to add a score.
"""
