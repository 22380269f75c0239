"""What a model attends to.

Begin with `explanation.py`: one sentence, with gradient saliency, and statistics of weights for training curves.
`faithfulness.py` measures a test set, attention against gradients.
"""
