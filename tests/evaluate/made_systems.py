"""Sentence statistics of BLEU of systems that are equally good, with variance between seeds and between sentences."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nmt.evaluate.formulas import bleu

LONGEST = 21  # tokens
BASE, SLOPE = 0.42, 0.0245  # how easy a token is on average, and what a BLEU more adds to that
OF_SENTENCE, OF_TOKEN, OF_SYSTEM, OF_SEED = 0.5, 1.0, 0.3, 0.4  # standard deviations of how easy a token is


def made_systems(
    rng: np.random.Generator, sentences: int, seeds: tuple[int, int], sds: tuple[float, float], gain: float = 0.0
) -> list[list[NDArray[np.int64]]]:
    """Two systems of about 36 BLEU: a list of (N, 10) for each. sds: of each system between seeds, in BLEU.

    A token is right where it is easy enough, and an n-gram where its tokens are. Tokens are easy or hard for all, and
    a little more so for a system, and for each seed. `gain` is the second system's advantage in BLEU.
    """
    length = rng.integers(6, LONGEST + 1, sentences)
    reference = length + rng.integers(-1, 2, sentences)
    inside = np.arange(LONGEST) < length[:, None]
    shape = sentences, LONGEST
    easy = BASE + OF_SENTENCE * rng.standard_normal((sentences, 1)) + OF_TOKEN * rng.standard_normal(shape)
    totals = np.stack([length - order for order in range(4)], 1)
    systems = []
    for number, (count, sd) in enumerate(zip(seeds, sds, strict=True)):
        of_system = easy + OF_SYSTEM * rng.standard_normal(shape)
        outputs = []
        for _ in range(count):
            shift = SLOPE * (gain * number + sd * rng.standard_normal())
            right = (of_system + shift + OF_SEED * rng.standard_normal(shape) > 0) & inside
            matches = [sliding_window_view(right, order, axis=1).all(-1).sum(1) for order in range(1, 5)]
            outputs.append(np.column_stack([length, reference, *matches, totals]))
        systems.append(outputs)
    return systems


def scores(systems: list[list[NDArray[np.int64]]]) -> list[list[float]]:
    """BLEU of each output."""
    return [[float(bleu(rows.sum(0))) for rows in outputs] for outputs in systems]
