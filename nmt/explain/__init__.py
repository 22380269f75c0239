"""Explanations of what a model attends to, and a measure of how well attention explains the output.

Begin with `explanation.py`: it explains one sentence pair, with gradient saliency, and computes statistics of attention
weights for training curves. Over a test set, `faithfulness.py` compares attention with gradient saliency, and measures
what masking source tokens costs.
"""
