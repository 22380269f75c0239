"""Operations that make the loops over time steps fast, with gradients by hand.

Begin with `layers.py`: weight gradients of a loop are collected into one product. `output_loss.py` has losses that
never hold all logits, `draws.py` random numbers that belong to sentences. Each is tested against plain autograd.
"""
