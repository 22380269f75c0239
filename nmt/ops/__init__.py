"""Operations that make loops over time steps fast. Their gradients are written by hand and tested against autograd.

Begin with `products.py`. It computes the gradient of a weight by a single product, even if a loop uses the weight at
every step, and packs weights for a search. `output_loss.py` has losses that never hold all logits, `draws.py`
random numbers and dropout, and `trees.py` functions of the tensors in nested tuples.
"""
