"""Student's t distribution with any number of degrees of freedom, whole or not.

With t = sqrt(freedom) tan(angle), the density of the angle is proportional to cos(angle)^(freedom - 1); its integral is
computed by Gauss and Legendre's rule.
"""

import math

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)
_WIDTHS = 12  # standard deviations beyond which a tail holds less than 1e-30
_STEPS = 45  # of bisection


def t_p_value(t: float, freedom: float) -> float:
    """The probability that |T| is at least |t|, for T with this many degrees of freedom (at least 1)."""
    return min(1.0, _mass(math.atan(abs(t) / math.sqrt(freedom)), freedom) / _mass(0.0, freedom))


def t_quantile(probability: float, freedom: float) -> float:
    """The t that T with this many degrees of freedom (at least 1) exceeds with 1 - probability.

    probability lies in [0.5, 1).
    """
    low, high, tail = 0.0, math.pi / 2, 2 * (1 - probability) * _mass(0.0, freedom)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _mass(middle, freedom) > tail else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _mass(start: float, freedom: float) -> float:
    """The integral of cos(angle)^(freedom - 1) from `start` to a right angle, or to where nothing is left."""
    half = min(math.pi / 2 - start, _WIDTHS / math.sqrt(freedom)) / 2
    angles = start + half * (1 + _NODES)
    return float(half * (_WEIGHTS @ np.cos(angles) ** (freedom - 1)))
