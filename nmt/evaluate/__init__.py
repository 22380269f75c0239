"""Scores translations: BLEU, chrF and TER by sacreBLEU, alignment error rate; tests differences of scores.

Begin with `evaluation.py`, which validation and nmt-evaluate share. `metrics.py` holds the table of metrics,
`significance.py` tests whether scores differ.
"""
