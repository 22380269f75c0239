"""Operations with gradients by hand, which make the loops over time steps fast.

Begin with `shared.py` and `linear.py`: weight gradients of a loop are collected into one product. `additive.py` is
the additive score, `distributions.py` has those over source positions; `output_loss.py` and `mixture.py` are losses
that never hold all logits. Each is tested against plain autograd.
"""
