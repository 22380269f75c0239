"""Explanations of what a model attends to.

Begin with `explanation.py`: it explains one sentence pair, with gradient saliency, and computes statistics of attention
weights for training curves.
"""
