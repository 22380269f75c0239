"""A dry run: the checks of a run, its model and a few updates, to estimate the time and memory of the whole run."""

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nmt.config import schema
from nmt.data.batching import Indices
from nmt.data.prepare.prepare import fingerprint_of, is_prepared
from nmt.system.distributed import Interrupted
from nmt.system.text_table import human_duration
from nmt.training.job import TrainingSetup, train
from nmt.training.journal import sample_figures
from nmt.training.trainer import Observer, Trainer

SECONDS = 5.0  # of updates whose time is taken
MOST_UPDATES = 500
CANDIDATES = 1_000  # batches, in the random order of the epoch, among which the largest is looked for
MINUTE = 60  # seconds
PAIRS = 32  # that are validated
GIB = 2**30


class Costs(NamedTuple):
    """What was measured, in seconds."""

    preparation: float
    update: float
    tokens: float  # target tokens of an update
    validation: float  # whatever the number of pairs
    pair: float  # each pair of a validation


def dry_run(
    config: schema.TrainConfig,
    directory: Path,
    overrides: list[str],
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> int:
    """`train` as far as the first updates and a validation of a few pairs; then print what the run would take.

    Writes nothing outside of the folder in which `directory` lies. A corpus that is not in the cache is prepared there.
    Returns the exit status: 0, or 128 + the signal that stopped it.
    """
    began, cache = time.perf_counter(), directory.parent / "cache"
    cache.mkdir(exist_ok=True)
    elsewhere = config.data.model_copy(update={"cache_dir": str(cache)})
    if not is_prepared(config.data, fingerprint_of(elsewhere, config.tokenizer)):
        config = config.model_copy(update={"data": elsewhere})
    return train(config, directory, overrides, choices, observer, partial(_measure, began=began))


def _measure(setup: TrainingSetup, began: float) -> int:
    trainer, preparation = setup.trainer, time.perf_counter() - began
    try:
        with trainer.signals:
            costs = Costs(preparation, *_time_updates(trainer), *_time_validation(trainer))
    except Interrupted as stop:
        return 128 + stop.signum
    peak = trainer.group.largest(peak_memory(trainer.translator.machine.device))
    if trainer.group.is_main:
        print("\n".join(report(setup, costs, peak)))
    return 0


def _time_updates(trainer: Trainer) -> tuple[float, float]:
    """Seconds and target tokens of an update, the mean of several."""
    candidates = [*trainer.plan[:CANDIDATES]]
    largest = max(candidates, key=partial(_attention_size, trainer))
    trainer.plan = [largest, largest, *candidates]
    _updates(trainer, 1)  # allocates the optimizer's state
    seconds, _ = _updates(trainer, 1)
    count = trainer.group.largest(min(math.ceil(SECONDS / seconds), MOST_UPDATES))
    if trainer.updater.graphed is not None:  # CUDA graphs are recorded when a shape occurs for the second time
        count = min(count, len(candidates))
        trainer.plan, trainer.position = candidates[:count] * 3, 0
        _updates(trainer, 2 * count)
    seconds, tokens = _updates(trainer, count)
    return seconds / count, tokens / count


def _attention_size(trainer: Trainer, indices: Indices) -> int:
    """B x T x S of a batch: of those with equally many tokens, that with the longest sentences takes most memory."""
    split = trainer.train_batches.split
    return len(indices) * int(split.source.lengths_of(indices).max()) * int(split.target.lengths_of(indices).max())


def _updates(trainer: Trainer, count: int) -> tuple[float, int]:
    """Seconds and target tokens of the next `count` updates. Raises Interrupted at a signal."""
    seconds, tokens = trainer.seconds, trainer.tokens
    for _ in range(count):
        if trainer.update():
            trainer.stop_if_signalled()
    return trainer.seconds - seconds, trainer.tokens - tokens


def _time_validation(trainer: Trainer) -> tuple[float, float]:
    """Seconds that a validation takes whatever its size, and for each pair. Raises Interrupted at a signal.

    All translations are as long as the longest reference: a batch takes as long as its longest translation, and the
    length of those of an untrained model means nothing.
    """
    split, searcher = trainer.validator.batches.split, trainer.translator.searcher
    start = max(0, len(split) - PAIRS) // 2
    pairs = np.argsort(split.source.lengths, kind="stable")[start : start + PAIRS]  # of usual length
    length = int(split.target.lengths_of(pairs).max())
    lengths = {"min_length": length, "max_length": length}
    trainer.translator.searcher = searcher.with_settings(searcher.settings.model_copy(update=lengths))
    validate = trainer.validator.only(pairs)
    first = _seconds(lambda: [sample_figures(sample) for sample in validate().samples])
    second = _seconds(validate)  # the model is prepared for search already
    return max(0.0, first - second), second / len(pairs)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peak_memory(device: torch.device) -> int:
    """Bytes: of a CUDA GPU what torch has reserved, else of this process, each at most so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def report(setup: TrainingSetup, costs: Costs, peak: int) -> list[str]:
    """Lines for the user: what the run would take."""
    trainer, splits, config = setup.trainer, setup.prepared.splits, setup.config
    epoch, total = len(trainer.train_batches.epoch(0)), trainer.total_steps
    validations = validations_of(config, epoch, total)
    seconds = costs.preparation + total * costs.update
    seconds += validations * (costs.validation + len(splits["validation"]) * costs.pair)
    held_out = [split for name, split in splits.items() if name != "train"]
    seconds += sum(costs.validation + len(split) * costs.pair for split in held_out)
    group, device = trainer.group, trainer.translator.machine.device
    kind = "GPU memory" if device.type == "cuda" else "memory"
    return [
        f"model: {setup.parameters:,} parameters",
        f"{kind}: {peak / GIB:.2f} GiB at peak{f', in each of {group.size} processes' if group.size > 1 else ''}",
        f"update: {duration(costs.update)}, {costs.tokens / costs.update:,.0f} target tokens per second",
        f"epoch: {duration(epoch * costs.update)} (updates: {epoch:,})",
        f"validation: {duration(costs.validation + len(splits['validation']) * costs.pair)}",
        f"run: {'at most ' if config.validation.patience else ''}{duration(seconds)} (updates: {total:,}, "
        f"epochs: {total / epoch:.3g}, validations: {validations}, and the final evaluation)",
        "dry run: found no errors, and leaves nothing behind",
    ]


def validations_of(config: schema.TrainConfig, epoch: int, total: int) -> int:
    """Validations of a run of `total` updates, `epoch` of them in an epoch, if patience does not end it."""
    training, validation = config.training, config.validation
    interval = validation.every * (1 if validation.unit == "steps" else epoch)
    others = (training.start_from is not None) + (training.average_best > 1)
    return math.ceil(total / interval) + others


def duration(seconds: float) -> str:
    """Like human_duration, but below a minute with three digits."""
    return f"{seconds:.3g} s" if seconds < MINUTE else human_duration(seconds)
