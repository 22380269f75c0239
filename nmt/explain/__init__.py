"""What a model attends to.

Begin with `explanation.py` (one sentence) or `faithfulness.py` (a test set: attention against gradients).
`heatmap.py` draws, `saliency.py` computes gradients.
"""
