"""Runs a dry run: it sets up a job, times a few updates and a small validation, and estimates the time and
memory of the whole job."""

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nmt.config import schema
from nmt.data.batching import Indices
from nmt.data.prepare import fingerprint_of, is_prepared
from nmt.system.distributed import Interrupted
from nmt.system.text_table import human_duration
from nmt.training.job import Job, Setup, set_up
from nmt.training.loop import Observer
from nmt.training.trainer import Trainer
from nmt.training.utilisation import ideal_seconds

TIMED_SECONDS = 5.0  # updates are timed for about this long
MOST_UPDATES = 500  # largest number of updates that are timed
CANDIDATES = 1_000  # number of batches, from the start of the shuffled epoch, among which the largest is found
PAIRS = 32  # sentence pairs of the timed validation
MINUTE = 60  # seconds
GIB = 2**30  # bytes


class Costs(NamedTuple):
    """The measurements of a dry run."""

    set_up: float  # seconds until the first update
    update: float  # mean seconds of an update
    tokens: float  # mean target tokens of an update
    pair: float  # mean seconds of a validation per sentence pair


def dry_run(
    config: schema.TrainConfig,
    directory: Path,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> int:
    """Set up a run, time a few updates and a small validation, and print what the whole run would take.

    Writes only into the parent folder of `directory`. If data.cache_dir does not hold the prepared corpus, the corpus
    is prepared in that parent folder. Returns an exit status: 0, or 128 + the number of the signal that stopped the dry
    run. `observer` is ignored: `dry_run` has the parameters of `train`, so that either can be called.
    """
    began, cache = time.perf_counter(), directory.parent / "cache"
    cache.mkdir(exist_ok=True)
    elsewhere = config.data.model_copy(update={"cache_dir": str(cache)})
    if not is_prepared(config.data, fingerprint_of(elsewhere, config.tokenizer)):
        config = config.model_copy(update={"data": elsewhere})
    with Job.join(config, directory) as job:
        setup = set_up(job, overrides, choices)
        trainer, set_up_seconds = setup.trainer, time.perf_counter() - began
        try:
            with trainer.signals:
                update, tokens = _time_updates(trainer, TIMED_SECONDS)
                peak = job.group.largest(peak_memory(job.machine.device))
                pair = _time_validation(setup)
                ideal = job.group.on_main(lambda: ideal_seconds(trainer, cache))
                costs = Costs(set_up_seconds, update, tokens, pair)
        except Interrupted as stop:
            return 128 + stop.signum
        if job.group.is_main:
            print("\n".join(cost_report(setup, costs, peak, ideal)))
    return 0


def _time_updates(trainer: Trainer, seconds: float) -> tuple[float, float]:
    """Return the mean time of an update in seconds and its mean target tokens, measured for about `seconds`. The first
    two updates are on the largest batch, so that memory reaches its peak."""
    candidates, split = [*trainer.plan[:CANDIDATES]], trainer.batches.split

    def attention_size(indices: Indices) -> int:
        """Return B x T x S. Since batches have about equal tokens, the one with most weights takes most memory."""
        return len(indices) * int(split.source.lengths_of(indices).max()) * int(split.target.lengths_of(indices).max())

    largest = max(candidates, key=attention_size)
    trainer.plan = [largest, largest, *candidates]
    _updates(trainer, 1)  # not timed, because it also allocates the optimizer's state
    one, _ = _updates(trainer, 1)
    count = trainer.group.largest(min(math.ceil(seconds / one), MOST_UPDATES))
    # A CUDA graph is recorded when a batch shape occurs for the second time: run all batches twice before timing them.
    if trainer.graphed is not None:
        count = min(count, len(candidates))
        trainer.plan, trainer.batch_index = candidates[:count] * 3, 0
        _updates(trainer, 2 * count)
    spent, tokens = _updates(trainer, count)
    return spent / count, tokens / count


def _updates(trainer: Trainer, count: int) -> tuple[float, int]:
    """Make the next `count` updates; return their total seconds and target tokens. Raises Interrupted at a signal."""
    seconds, tokens = trainer.seconds, trainer.tokens
    for _ in range(count):
        if trainer.next_update().stop:
            trainer.stop_if_signalled()
    return trainer.seconds - seconds, trainer.tokens - tokens


def _time_validation(setup: Setup) -> float:
    """Measure the mean seconds of a validation per sentence pair. Raises Interrupted at a signal.

    Every translation is forced to the length of the longest reference, because the time of a batch depends on its
    longest translation, and an untrained model would end translations at arbitrary lengths. The translator keeps these
    limits.
    """
    split, translator = setup.corpus.splits["validation"], setup.translator
    first = max(0, len(split) - PAIRS) // 2
    pairs = np.argsort(split.source.lengths, kind="stable")[first : first + PAIRS]  # around the median source length
    length = int(split.target.lengths_of(pairs).max())
    lengths = {"min_length": length, "max_length": length, "max_ratio": length}  # a ratio that limits no translation
    translator.use_search(translator.settings.model_copy(update=lengths))
    setup.validator(pairs)  # not timed, because it also makes the search model
    began = time.perf_counter()
    setup.validator(pairs)
    return (time.perf_counter() - began) / len(pairs)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: the memory reserved by torch on a CUDA GPU, else that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cost_report(setup: Setup, costs: Costs, peak: int, ideal: float) -> list[str]:
    """Write the lines that tell the user how much time and memory the run would take. ideal: see `ideal_seconds`."""
    trainer, splits, config = setup.trainer, setup.corpus.splits, setup.job.config
    epoch, total = len(trainer.batches.epoch(0)), trainer.total_steps
    interval = config.validation.every * (1 if config.validation.unit == "steps" else epoch)
    validations = math.ceil(total / interval) + (config.training.start_from is not None)
    validation = len(splits["validation"]) * costs.pair
    seconds = costs.set_up + total * costs.update + validations * validation
    seconds += sum(len(split) for split in setup.corpus.held_out) * costs.pair
    group, device = setup.job.group, setup.job.machine.device
    kind = "GPU memory" if device.type == "cuda" else "memory"
    return [
        f"model: {setup.parameters:,} parameters",
        f"{kind}: {peak / GIB:.2f} GiB at peak{f', in each of {group.size} processes' if group.size > 1 else ''}",
        f"update: {duration(costs.update)}, {costs.tokens / costs.update:,.0f} target tokens per second",
        f"utilisation: {costs.tokens * ideal / (costs.update * group.size):.0%} of the rate of a large matrix product",
        f"epoch: {duration(epoch * costs.update)} (updates: {epoch:,})",
        f"validation: {duration(validation)}",
        f"run: {'at most ' if config.validation.patience else ''}{duration(seconds)} (updates: {total:,}, "
        f"epochs: {total / epoch:.3g}, validations: {validations}, and the final evaluation)",
        "dry run: found no errors, and leaves nothing behind",
    ]


def duration(seconds: float) -> str:
    """Format a duration below a minute as seconds with three significant digits, else like human_duration."""
    return f"{seconds:.3g} s" if seconds < MINUTE else human_duration(seconds)
