"""Measures how well training uses its device.

Utilisation is the rate (FLOP/s) of an update's matrix products, divided by the rate of one large product. It resembles
the model FLOPs utilisation of Chowdhery et al. (2022, "PaLM", appendix B), who divide by the device's peak rate. Only
the FLOPs of one forward and one backward pass of the model count, even if the objective computes more (R-Drop's second
pass, an inference network).
"""

import copy
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from nmt.data.batching import Batch
from nmt.model.seq2seq import Seq2Seq
from nmt.ops.products import matmul
from nmt.system.machine import DTYPES, Machine
from nmt.training.trainer import Trainer

RATES = "product_rates.json"  # file in the cache folder: FLOP/s by device, threads, precision and torch version
SIDES = 512, 8192  # rows of the smallest and of the largest square matrices that are multiplied
ENOUGH = 0.003  # a product that takes this many seconds can be timed accurately
REPEATS = 3
SENTENCES = 8  # number of sentence pairs, each from another batch, whose FLOPs are counted


def ideal_seconds(trainer: Trainer, cache: Path) -> float:
    """Compute the seconds per target token of an update whose matrix products all run as fast as one large product.

    These are the products' FLOPs per target token, counted on a few training pairs, divided by the FLOP/s of a large
    product. Other work takes no time. cache: the folder that keeps the measured FLOP/s.
    """
    numbers = np.linspace(0, len(trainer.plan) - 1, SENTENCES).astype(int)
    pairs = [batch for number in numbers for batch in trainer.batches.load(trainer.plan[number][:1], 0)]
    return flops_per_token(trainer.model, pairs, trainer.objective.token_loss.pad) / best_product_rate(
        trainer.machine, cache
    )


def flops_per_token(model: Seq2Seq, batches: Sequence[Batch], pad: int) -> float:
    """Count the FLOPs of an update's matrix products, per target token of these batches, which are on the CPU. Counts
    the forward pass and multiplies by 3, because the backward pass takes twice the FLOPs of the forward pass."""
    # The copy computes in float64, because the counter does not know the fused kernels of float32.
    double = copy.deepcopy(model).cpu().double().eval().requires_grad_(False)
    with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
        for batch in batches:
            decoded = double(batch.source, batch.lengths, batch.target_in)
            double.log_probs(decoded.prediction, batch.target_out, pad)
    return float(3 * counter.get_total_flops() / sum(batch.target_tokens for batch in batches))


def best_product_rate(machine: Machine, cache: Path) -> float:
    """Return the highest `product_rate` of a machine that any run with the folder `cache`, this one included, measured.

    Beside other processes a product is several times slower, and a run may start at such a time.
    """
    path, rates = cache / RATES, dict[str, float]()
    key = " ".join(str(value) for value in [*machine.describe().values(), torch.__version__])
    # A kill may leave half a file, which the next run replaces.
    with suppress(OSError, ValueError):
        rates = dict(json.loads(path.read_text(encoding="utf-8")))
    measured = product_rate(machine)
    if measured > rates.get(key, 0):
        rates[key] = measured
        # This user may have no right to write to the cache.
        with suppress(OSError):
            path.write_text(json.dumps(rates, indent=1), encoding="utf-8")
    return float(rates[key])


def product_rate(machine: Machine) -> float:
    """Measure the FLOP/s of a product of two square matrices, in the machine's precision. The matrices grow until the
    product takes `ENOUGH` seconds or they have the largest of `SIDES`."""
    side, largest = SIDES
    while True:
        shape = side, side
        matrix = torch.full(shape, 0.5, device=machine.device, dtype=DTYPES[machine.precision])
        seconds = min(_seconds_of_product(machine, matrix) for _ in range(1 + REPEATS))
        if seconds >= ENOUGH or side >= largest:
            return float(2 * side**3 / seconds)
        side *= 2


def _seconds_of_product(machine: Machine, matrix: torch.Tensor) -> float:
    machine.synchronize()
    began = time.perf_counter()
    matmul(matrix, matrix)
    machine.synchronize()
    return time.perf_counter() - began
