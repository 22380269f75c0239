"""Scores translations: BLEU, chrF and TER by sacreBLEU, alignment error rate; tests differences of scores.

Begin with `evaluation.py`: validation and nmt-evaluate share it, and it holds COMET. `bleu.py` computes the scores of
sacreBLEU, `significance.py` tests whether scores differ.
"""
