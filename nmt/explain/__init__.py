"""What a model attends to.

Begin with `explanation.py` (one sentence, with gradient saliency) or `faithfulness.py` (a test set: attention against
gradients). `heatmap.py` draws, `attention_statistics.py` summarises weights for training curves.
"""
