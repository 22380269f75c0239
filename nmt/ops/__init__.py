"""Operations that make loops over time steps fast. Their gradients are written by hand and tested against autograd.

Begin with `layers.py`, which computes the gradient of a weight that a loop uses at every step by one product.
`output_loss.py` has losses that never hold all logits, `draws.py` random numbers that belong to sentences.
"""
