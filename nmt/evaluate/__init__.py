"""The one scoring path: BLEU, chrF and TER by sacreBLEU, alignment error rate, COMET, and tests of differences.

Begin with `evaluation.py`, which validation and nmt-evaluate share; it holds COMET as well. `bleu.py` computes scores,
`significance.py` tests their differences.
"""
