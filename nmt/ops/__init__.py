"""Operations with gradients by hand, which make the loops over time steps fast.

Begin with `linear.py` and `shared.py`: weight gradients of a loop are collected into one product. `additive.py` is
the additive score, `output_loss.py` and `mixture.py` are losses that never hold all logits. Each is tested against
plain autograd.
"""
