"""Find a learning rate for a run: a learning-rate range test.

python scripts/find_lr.py [OPTION ...] [KEY=VALUE ...]

KEY=VALUE are overrides as for nmt-train. The rate rises exponentially with every update, until the loss diverges. The
script prints a rate that is safely below the one at which the loss was lowest, as the override to give: it suits the
peak of the run's schedule. It writes find_lr.png and find_lr.json (Smith 2017, "Cyclical learning rates for training
neural networks", section 3.3, where the rate rises linearly).
"""

import argparse
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm import tqdm

from nmt.cli.compose import RunRequest, new_run
from nmt.cli.run_command import run_command
from nmt.config.errors import UserError
from nmt.system.distributed import Interrupted
from nmt.system.files import to_json, write_atomically
from nmt.training.job import Job, set_up
from nmt.training.trainer import Trainer
from nmt.translate.heatmap import save

RANGE = 1_000.0  # by default the rate rises from optimizer.lr / RANGE to optimizer.lr * RANGE
SMOOTHING = 0.9  # weight of earlier losses in the smoothed loss
SLOPE = 0.15  # standard deviation, in decades of the rate, of the Gaussian that smooths losses before slopes are taken
FIRST = 10  # number of first updates, at nearly the same rate, whose mean is the loss at the start
# The suggested rate is this share of the rate with the lowest loss: there the loss is about to rise, and a run is
# longer than the test.
SAFE = 0.1
FALLEN = 0.99  # the loss has fallen if it is below this share of the first loss; a smaller fall is noise
DIVERGED = 1.25  # the loss has diverged if the smoothed loss is above this multiple of the loss at the start
MIN_UPDATES = 20
Numbers = NDArray[np.float64]


class Ramp(NamedTuple):
    """Learning rates that rise exponentially, in place of the run's schedule."""

    start: float
    end: float
    updates: int
    lr: float  # optimizer.lr, which `factor` multiplies

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate in an update, like nmt.training.optimizer.Schedule."""
        return float(self.start * (self.end / self.start) ** ((step - 1) / (self.updates - 1)) / self.lr)


def range_test(trainer: Trainer, ramp: Ramp, rates: list[float], losses: list[float]) -> None:
    """Train with rising rates, and append the rate and the loss (nats per target token) of each update to the lists.
    Raises Interrupted at a signal."""
    trainer.schedule = ramp  # type: ignore[assignment]
    with trainer.signals, tqdm(total=ramp.updates, unit=" updates", disable=None) as bar:
        while len(losses) < ramp.updates and not diverged(losses):
            update = trainer.next_update()
            if update.stop:
                trainer.stop_if_signalled()
            if not update.applied and trainer.scaler.is_enabled() and trainer.scaler.get_scale() > 1:
                continue  # the gradient scaler of fp16 is still looking for its scale
            rates.append(trainer.optimizer.param_groups[0]["lr"])
            # An update that was skipped for another reason counts as an infinite loss, which ends the test.
            losses.append(float(update.terms["loss"]) / update.tokens if update.applied else math.inf)
            bar.update()


def diverged(losses: list[float]) -> bool:
    """Is the latest loss infinite, or the smoothed loss well above the loss at the start?"""
    if len(losses) <= FIRST:
        return bool(losses) and not math.isfinite(losses[-1])
    return not smoothed(losses)[-1] <= DIVERGED * np.mean(losses[:FIRST])


def smoothed(losses: list[float]) -> Numbers:
    """Compute exponential moving means, without a bias towards the first value: (N,) -> (N,)."""
    weights = SMOOTHING ** np.arange(len(losses))
    sums = [float(weights[: n + 1][::-1] @ losses[: n + 1]) for n in range(len(losses))]
    result: Numbers = np.array(sums) / np.cumsum(weights)
    return result


def landmarks(rates: list[float], losses: list[float]) -> tuple[float, float] | None:
    """Find the rates of the fastest fall of the loss (per decade) and of its lowest value; None if it does not fall."""
    finite = [number for number, loss in enumerate(losses) if math.isfinite(loss)]
    if len(finite) < 2:  # noqa: PLR2004
        return None
    decades, values = np.log10(rates)[finite], np.array(losses)[finite]
    kernel = np.exp(-0.5 * ((decades[:, None] - decades) / SLOPE) ** 2)
    means = kernel @ values / kernel.sum(1)
    slopes = np.gradient(means, decades)
    lowest = int(means.argmin())
    fastest = int(slopes[: lowest + 1].argmin())
    return (rates[finite[fastest]], rates[finite[lowest]]) if means[lowest] < FALLEN * means[0] else None


def draw(rates: list[float], losses: list[float], suggestion: float | None) -> Figure:
    """Draw the loss by the rate, and mark the suggested rate."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="loss (nats per target token)")
    axes.plot(rates, losses, ".", color="0.75", label="of an update")
    axes.plot(rates, smoothed(losses), label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color="C1", linestyle="--", label=f"suggested: {suggestion:.2g}")
    if math.isfinite(losses[0]):
        axes.set_ylim(top=1.1 * DIVERGED * losses[0])  # losses that diverge would stretch the axis
    axes.legend()
    return figure


def find(start: RunRequest, options: argparse.Namespace) -> int:
    """Run the test, print the suggestion and write the results. Returns the exit status. Raises UserError if the loss
    has not fallen."""
    config, folder = start.config, start.directory
    lr = config.optimizer.lr
    ramp = Ramp(options.start or lr / RANGE, options.end or lr * RANGE, options.updates, lr)
    if ramp.start >= ramp.end:
        raise UserError(f"--start {ramp.start:g}: must be below --end {ramp.end:g}")
    rates: list[float] = []
    losses: list[float] = []
    try:
        with tempfile.TemporaryDirectory(prefix="nmt-find-lr-") as run, Job.join(config, Path(run)) as job:
            setup = set_up(job, start.overrides, start.choices)
            range_test(setup.trainer, ramp, rates, losses)
    except Interrupted as stop:
        return 128 + stop.signum
    found = landmarks(rates, losses)
    fastest, lowest = found or (None, None)
    suggestion = None if lowest is None else SAFE * lowest
    results: dict[str, Any] = {
        "overrides": start.overrides,
        "seed": config.seed,
        "rates": rates,
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "fastest": fastest,
        "lowest": lowest,
        "diverged": diverged(losses),
        "suggestion": suggestion,
    }
    write_atomically(folder / "find_lr.json", f"{to_json(results, indent=1)}\n".encode())
    save(draw(rates, losses, suggestion), folder / "find_lr.png")
    print(folder / "find_lr.png")
    print(folder / "find_lr.json")
    if suggestion is None:
        raise UserError(
            f"the loss has not fallen between {rates[0]:.2g} and {rates[-1]:.2g}; try another --start and --end"
        )
    end = f"diverged at {rates[-1]:.2g}" if results["diverged"] else f"had not diverged at {rates[-1]:.2g}: raise --end"
    print(f"the loss fell fastest at {fastest:.2g}, was lowest at {lowest:.2g}, and {end}")
    print(f"optimizer.lr={suggestion:.2g}")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=float, help="first rate; default: optimizer.lr / 1000")
    parser.add_argument("--end", type=float, help="last rate; default: optimizer.lr x 1000")
    parser.add_argument("--updates", type=int, default=200, help="from the first to the last; default: 200")
    options, sys.argv[1:] = parser.parse_known_args()
    if options.updates < MIN_UPDATES:
        parser.error(f"--updates must be at least {MIN_UPDATES}")
    if any(rate is not None and not 0 < rate < math.inf for rate in (options.start, options.end)):
        parser.error("--start and --end must be above 0")
    sys.argv.append("hydra.job.name=find_lr")

    def task(start: RunRequest) -> int:
        if start.config.processes > 1:
            raise UserError("find_lr tests a new run in one process; leave out processes=")
        logging.getLogger("nmt").setLevel(logging.WARNING)
        return find(start, options)

    run_command("train", lambda options: task(new_run(options.overrides)))


if __name__ == "__main__":
    main()
