"""Time one decoder step of attention, forward and backward, for growing source lengths: global against local windows.

python scripts/time_windows.py [--lengths 50 500 5000] [--score additive]
"""

import argparse
import time

import torch

from nmt.attention.attention import Attention
from nmt.attention.normalizers import SoftmaxNormalizer
from nmt.attention.scores import AdditiveScore, GeneralScore, Score
from nmt.attention.windows import GlobalWindow, LocalMonotonicWindow, LocalPredictiveWindow, Window
from nmt.ops.products import deferring
from nmt.system.text_table import Column, decimals, markdown

DIM, BATCH, REACH = 512, 8, 10
FEW, MANY = 5, {"global": 25, "local": 400}  # decoder steps of a short and of a long sentence
ROUNDS = 3  # timed sentences of each length, of which the fastest counts


def seconds(score: Score, window: Window, length: int) -> float:
    """Measure the seconds per decoder step, without the cost per sentence. The cost per sentence cancels in the
    difference between the times of a long and of a short sentence."""
    attention = Attention(score, window, SoftmaxNormalizer())
    states = torch.randn(BATCH, length, DIM, requires_grad=True)
    valid = torch.ones(BATCH, length, dtype=torch.bool)
    query = torch.randn(BATCH, 1, DIM, requires_grad=True)

    def sentence(steps: int) -> float:
        began = time.perf_counter()
        # As in a decoder, which computes the gradient of keys and values once for all steps.
        memory = attention.remember(states, valid).deferred()
        past, total = None, torch.zeros(())
        with deferring(attention):
            for _ in range(steps):
                attended = attention.sequence(query, memory, past)
                past, total = attended.past, total + attended.context.sum()
        total.backward()
        return time.perf_counter() - began

    long = MANY["global" if window.reach is None else "local"]
    few, many = (min(sentence(steps) for _ in range(ROUNDS)) for steps in (FEW, long))
    return (many - few) / (long - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 500, 5000], help="source lengths S")
    parser.add_argument("--score", choices=["additive", "general"], default="additive")
    arguments = parser.parse_args()
    if min(arguments.lengths) < 1:
        parser.error("--lengths must be at least 1")
    score: Score = AdditiveScore(DIM, DIM, DIM) if arguments.score == "additive" else GeneralScore(DIM, DIM)
    windows = {
        "global": GlobalWindow(),
        "local_m": LocalMonotonicWindow(REACH),
        "local_p": LocalPredictiveWindow(REACH, DIM, DIM),
    }
    rows = [
        {"window": name, **{str(S): 1e3 * seconds(score, window, S) for S in arguments.lengths}}
        for name, window in windows.items()
    ]
    print(
        f"milliseconds a step, score {arguments.score}, batch {BATCH}, D = {REACH}, {torch.get_num_threads()} threads\n"
    )
    print(
        markdown(
            rows, [Column("window", "window"), *(Column(str(S), f"S = {S}", decimals(2)) for S in arguments.lengths)]
        )
    )


if __name__ == "__main__":
    main()
