"""The one scoring path: BLEU, chrF and TER by sacreBLEU, alignment error rate, COMET, and tests of differences.

Begin with `evaluation.py`, which validation, nmt-evaluate and nmt-compare share; `bleu.py` computes scores,
`effects.py` and `significance.py` test their differences.
"""
