"""Runs a training job (prepare, build, fit, evaluate), or a dry run, which estimates the time and memory of the job.

All processes of a group run the same job. Work that only rank 0 may do, or that may fail on one process, goes through
`group.on_main`, `group.main_first` or `group.everywhere`, which raise the error of one process on all of them.
"""

import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from nmt.config import schema
from nmt.config.errors import UserError, for_shell, user_path
from nmt.data.batching import Indices, make_batches
from nmt.data.prepare import fingerprint_of, is_prepared
from nmt.data.prepare import prepare as prepare_corpus
from nmt.data.prepared import Prepared, Split
from nmt.evaluate.evaluation import evaluate_run, score_settings
from nmt.evaluate.metrics import METRICS, ScoreSettings, shown
from nmt.model.checkpoints import BEST, LAST, load_weights, new_model
from nmt.system.distributed import Interrupted, ProcessGroup
from nmt.system.machine import Machine, fair_waiting, tune_memory
from nmt.system.run import FINISHED, PRUNED, RunDirectory, read_json
from nmt.system.text_table import human_duration
from nmt.training.journal import (
    Journal,
    NullJournal,
    check_packages,
    log_to_file,
    save_figures,
)
from nmt.training.loop import Observer, Pruned, TrainingLoop
from nmt.training.losses import Objective
from nmt.training.start import Start, Teachers, corpus_report, load_start, load_teachers, log_corpus_report
from nmt.training.trainer import Trainer
from nmt.training.utilisation import ideal_seconds
from nmt.training.validation import Validator, pick_samples
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)

# Settings of a dry run.
TIMED_SECONDS = 5.0  # updates are timed for about this long
MOST_UPDATES = 500  # largest number of updates that are timed
GAIN = 1.05  # batches are doubled as long as the speed grows by this factor
MEMORY_SHARE = 0.8  # share of a GPU's memory that batches may take
CANDIDATES = 1_000  # number of batches, from the start of the shuffled epoch, among which the largest is found
PAIRS = 32  # sentence pairs of the timed validation
MINUTE = 60  # seconds
GIB = 2**30  # bytes


def train(
    config: schema.TrainConfig,
    directory: Path,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> int:
    """Call `train_run` and return an exit status: 0, or 128 + the number of the signal that stopped the run."""
    try:
        train_run(config, directory, overrides, choices, observer)
    except Interrupted as stop:
        return 128 + stop.signum
    return 0


def train_run(
    config: schema.TrainConfig,
    directory: Path,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> RunDirectory:
    """Train and evaluate a run in `directory`, or resume the one there.

    overrides: what the user set, as typed; choices: the chosen option of each config group. Both are only recorded in
    the manifest. A run that the `observer` prunes is not evaluated. Raises Interrupted after a signal, once a
    checkpoint is saved.
    """
    with Job.join(config, directory) as job:
        inputs = prepare(job, overrides, choices or {})
        setup = build(job, inputs)
        with Journal(job.run, config) if job.group.is_main else NullJournal() as journal:
            if fit(setup, journal, observer):
                evaluate(setup, journal)
    return job.run


class Job(NamedTuple):
    """A configuration and where it is trained: run directory, machine and group of processes."""

    config: schema.TrainConfig
    run: RunDirectory
    machine: Machine
    group: ProcessGroup
    closing: ExitStack  # at the end of the job, releases the run directory and closes its log file

    @classmethod
    @contextmanager
    def join(cls, config: schema.TrainConfig, directory: Path) -> Iterator[Self]:
        """Join the group of processes that this process was started in. At the end of the context, release the run
        directory and leave the group."""
        tune_memory()
        machine = Machine.choose(config.device, config.precision, config.threads)
        run, stop = RunDirectory(directory), None
        with fair_waiting(), ProcessGroup.join() as group, ExitStack() as closing:
            group.refuse_differences(
                str(run.path.absolute()), "hydra.run.dir: differs from that of rank 0; give all processes the same"
            )
            group.refuse_differences(
                f"{machine.device.type} {machine.precision}",
                "device, precision: auto differs from that of rank 0; set device= and precision= for all processes",
            )
            closing.callback(run.release)
            try:
                yield cls(config, run, machine, group, closing)
            except Interrupted as interrupted:
                stop = interrupted  # raised below, because an error here would keep processes from leaving the group
        if stop is not None:
            raise stop


class Inputs(NamedTuple):
    """What `prepare` loads and `build` needs."""

    corpus: Prepared
    settings: ScoreSettings
    start: Start | None  # initial parameters from another run; None if they are random or from the last checkpoint
    teachers: Teachers


def prepare(job: Job, overrides: Sequence[str], choices: Mapping[str, str]) -> Inputs:
    """Claim the run directory, load all that the run needs, record how it starts, and begin its log file."""
    config, run, group = job.config, job.run, job.group
    values = config.model_dump(mode="json")
    settings = group.everywhere(lambda: _load_scoring(job))
    group.on_main(lambda: run.claim(values))
    corpus = group.main_first(lambda: prepare_corpus(config.data, config.tokenizer))
    group.refuse_differences(
        corpus.report["content"], "data: another corpus than that of rank 0; give all machines the same"
    )
    report = group.on_main(lambda: corpus_report(corpus, config, settings))
    resumed = group.on_main(lambda: _can_resume(run))
    start = None if resumed else group.everywhere(lambda: load_start(config, corpus))
    recorded = run.first_start().get("teachers", []) if resumed else []
    teachers = group.everywhere(lambda: load_teachers(config, corpus, job.machine, recorded))

    record: dict[str, Any] = {"overrides": [*overrides], "choices": choices}
    record["machine"] = {**job.machine.describe(), "processes": group.size}
    if start is not None:
        record["start_from"] = start.record
    if teachers.records:
        record["teachers"] = teachers.records
    group.on_main(lambda: run.begin(values, corpus, report, record))
    group.everywhere(lambda: _refuse_unshared(run))
    if group.is_main:
        job.closing.enter_context(log_to_file(run.log))
    log_corpus_report(report)
    return Inputs(corpus, settings, start, teachers)


def _can_resume(run: RunDirectory) -> bool:
    """Return whether the run has a checkpoint to resume from.

    Raises UserError if the run has ended and its checkpoint is gone: training anew would overwrite the best weights.
    """
    exists = (run.checkpoints / LAST).exists()
    if not exists and run.status() and (run.checkpoints / BEST).exists():
        raise UserError(
            f"{run.path}: has ended, and its checkpoints/{LAST} is gone, so that it cannot continue; measure it with "
            f"nmt-evaluate {for_shell('run', str(run.path))}, start a new run from its weights with "
            f"{for_shell('training.start_from', str(run.path))}, or delete it"
        )
    return exists


def _load_scoring(job: Job) -> ScoreSettings:
    """Check loggers and metrics, so that errors come before anything is written."""
    config = job.config
    check_packages(config.logger)
    return score_settings(config.evaluation, config.data.target_lang, config.validation.monitor)


def _refuse_unshared(run: RunDirectory) -> None:
    if not run.config.is_file():
        raise UserError(f"{run.path}: not on this machine; put the run on a file system that all machines share")


class Setup(NamedTuple):
    """What `build` makes, and `fit` and `evaluate` need."""

    job: Job
    corpus: Prepared
    settings: ScoreSettings
    translator: Translator
    trainer: Trainer
    validator: Validator

    @property
    def parameters(self) -> int:
        """Count the model's parameters."""
        return sum(parameter.numel() for parameter in self.trainer.model.parameters())

    @property
    def held_out(self) -> list[Split]:
        """Return the splits that the run is evaluated on: all but the training split."""
        return [split for split in self.corpus if split.name != "train"]


def build(job: Job, inputs: Inputs) -> Setup:
    """Build the model and all that trains and validates it. Warn of configuration values that have no effect."""
    config, machine, group = job.config, job.machine, job.group
    corpus, settings, start, teachers = inputs
    torch.manual_seed(config.seed)
    model = new_model(config, corpus.tokenizers)
    if start is not None:
        model.load_state_dict(start.weights)
        log.info("%s", start.description)
    model = model.to(machine.device)
    translator = Translator(model, corpus.tokenizers, config.search, machine, config.seed, group)
    objective = Objective(model, config, corpus.tokenizers.target.pad, teachers.models)
    batches = make_batches(corpus, "train", config, config.tokenizer.sampling_by_side)
    trainer = Trainer(config, model, objective, batches, machine, group)
    held_out, progress = make_batches(corpus, "validation", config), trainer.signals.check
    validator = Validator(held_out, translator, settings, config.validation, progress)
    setup = Setup(job, corpus, settings, translator, trainer, validator)
    log.info(
        "model: %s parameters; %s in %s, threads: %d%s",
        f"{setup.parameters:,}",
        machine.device,
        machine.precision,
        machine.describe()["threads"],
        f", processes: {group.size}" if group.size > 1 else "",
    )
    warn_of_no_effect(config, objective, trainer.total_steps)
    return setup


def warn_of_no_effect(config: schema.TrainConfig, objective: Objective, total_steps: int) -> None:
    """Warn of configuration values that would take effect only after the last update."""
    for loss in objective.auxiliary:
        if loss.start >= total_steps:
            log.warning("attention.coverage.loss_start=%d: the run ends before, at step %d", loss.start, total_steps)
    if config.schedule.warmup_steps > total_steps:
        text = "schedule.warmup_steps=%d: the run ends before, at step %d, and never reaches optimizer.lr"
        log.warning(text, config.schedule.warmup_steps, total_steps)


def fit(setup: Setup, journal: Journal, observer: Observer | None = None) -> bool:
    """Train to the end, from the last checkpoint if there is one. Returns False if the observer pruned the run.

    Raises Interrupted at a signal, once a checkpoint is saved. Raises UserError if the checkpoint does not fit the run,
    if training fails (see `TrainingLoop.fit`), or if no validation had a finite score.
    """
    config, run, group, trainer = setup.job.config, setup.job.run, setup.job.group, setup.trainer
    ideal = group.on_main(lambda: ideal_seconds(trainer, user_path(config.data.cache_dir)))
    loop = TrainingLoop(config, trainer, setup.validator, run, journal, observer, ideal_seconds=ideal)
    group.everywhere(loop.resume)
    status: dict[str, str] = {}
    try:
        with logging_redirect_tqdm([logging.getLogger("nmt")]):
            loop.fit()
    except Interrupted as stop:
        log.info("stopped by %s at step %d; resume with: nmt-train %s", stop, trainer.step, for_shell("run", run.path))
        raise
    except Pruned:
        log.info("pruned at step %d: other runs of the sweep are more promising", trainer.step)
        status = {"status": PRUNED}
        return False
    finally:
        if group.is_main and run.manifest.exists():
            values = {"parameters": setup.parameters, "training": loop.summary(), **status}
            run.update_json(run.manifest, values)
    if loop.stopping.best is None and loop.stopping.waited:
        raise UserError(
            f"validation.monitor={config.validation.monitor}: no validation had a finite score, so there is no best "
            "checkpoint; a smaller optimizer.lr may help"
        )
    return True


def evaluate(setup: Setup, journal: Journal) -> None:
    """Evaluate the best checkpoint on every held-out split, save heatmaps, and record that the run has finished."""
    run, group = setup.job.run, setup.job.group
    group.wait()  # until rank 0 has written the best checkpoint
    group.on_main(run.check_present)
    load_weights(setup.trainer.model, run.checkpoints / BEST)
    for split in setup.held_out:
        _evaluate_split(setup, split)
    group.on_main(lambda: _finish(setup, journal))


def _evaluate_split(setup: Setup, split: Split) -> None:
    run, translator, group = setup.job.run, setup.translator, setup.job.group
    hidden = group.hides_progress
    with tqdm(total=len(split), desc=f"translate {split.name}", unit=" sent", disable=hidden, leave=False) as bar:
        result, evaluation = evaluate_run(run, translator, split.name, setup.settings, "best", bar.update)
    log.info(
        "%s: %s%s  (%s)",
        split.name,
        shown(evaluation.scores),
        f"  AER {100 * result['aer']:.1f} %" if "aer" in result else "",
        evaluation.counted.signatures[setup.settings.metrics[0]],
    )
    texts = split.source.lines(), split.target.lines()
    if group.is_main:
        samples = pick_samples(translator, *texts, evaluation.translations, setup.job.config.validation)
        save_figures(run.alignments / split.name, samples)


def _finish(setup: Setup, journal: Journal) -> None:
    """Record the scores under names such as "best/test_bleu", and that the run has finished."""
    run = setup.job.run
    results = read_json(run.results)
    scores = {
        f"best/{split.name}_{key}": results[split.name][key]
        for split in setup.held_out
        for key in (*METRICS, "aer")
        if results.get(split.name, {}).get(key) is not None
    }
    journal.outcome(setup.trainer.step, scores)
    run.update_json(run.manifest, {"status": FINISHED})


class Costs(NamedTuple):
    """The measurements of a dry run."""

    preparation: float  # seconds until the first update
    update: float  # mean seconds of an update
    tokens: float  # mean target tokens of an update
    pair: float  # mean seconds of a validation per sentence pair
    rates: list[float]  # target tokens per second with batches of 1, 2, 4, ... times the configured size


def dry_run(
    config: schema.TrainConfig,
    directory: Path,
    overrides: Sequence[str] = (),
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> int:
    """Prepare and build a run, time a few updates and a small validation, and print what the whole run would take.

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
        setup = build(job, prepare(job, overrides, choices or {}))
        trainer, preparation = setup.trainer, time.perf_counter() - began
        try:
            with trainer.signals:
                update, tokens = _time_updates(trainer, TIMED_SECONDS)
                peak = job.group.largest(peak_memory(job.machine.device))
                pair = _time_validation(setup)
                ideal = job.group.on_main(lambda: ideal_seconds(trainer, cache))
                costs = Costs(preparation, update, tokens, pair, _time_larger_batches(setup, update, tokens))
        except Interrupted as stop:
            return 128 + stop.signum
        if job.group.is_main:
            print("\n".join(cost_report(setup, costs, peak, ideal)))
    return 0


def _time_updates(trainer: Trainer, seconds: float) -> tuple[float, float]:
    """Return the mean time of an update in seconds and its mean target tokens, measured for about `seconds`.

    The first two updates are on the largest batch, so that memory reaches its peak.
    """
    candidates = [*trainer.plan[:CANDIDATES]]
    largest = max(candidates, key=partial(_attention_size, trainer))
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


def _time_larger_batches(setup: Setup, seconds: float, tokens: float) -> list[float]:
    """Measure the target tokens per second of batches of 1, 2, 4, ... times the configured size; see `doubled_rates`.

    seconds, tokens: of an update of the configured size. Sizes that may take too much time or memory are left out.
    """
    trainer, group, device = setup.trainer, setup.job.group, setup.job.machine.device
    configured, updates = trainer.batches, 2 if trainer.graphed is None else 3
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf

    def measure(factor: int) -> float | None:
        too_slow = group.largest(factor * seconds) * updates > 2 * TIMED_SECONDS
        if too_slow or group.largest(2 * peak_memory(device) / memory) > MEMORY_SHARE:
            return None
        batches = make_batches(setup.corpus, "train", with_batches_of(setup.job.config, factor))
        plan = batches.epoch(0)
        if len(plan) == 1:
            return None
        # The first update allocates memory; with CUDA graphs, the second one records.
        trainer.batches, trainer.plan, trainer.batch_index = batches, [plan[0]] * updates, 0
        _updates(trainer, updates - 1)
        spent, tokens = _updates(trainer, 1)
        return tokens / group.largest(spent)

    rates = doubled_rates(tokens / seconds, measure)
    trainer.batches = configured
    return rates


def doubled_rates(first: float, measure: Callable[[int], float | None]) -> list[float]:
    """Measure rates with factors 2, 4, 8, ... until one gains little over the one before, or `measure` returns None."""
    rates = [first]
    while (rate := measure(2 ** len(rates))) is not None:
        rates.append(rate)
        if rate < GAIN * rates[-2]:
            break
    return rates


def with_batches_of(config: schema.TrainConfig, factor: int) -> schema.TrainConfig:
    """Multiply the limits of a batch, training.batch_tokens and training.batch_sentences, by a factor."""
    limits = {key: getattr(config.training, key) for key in ("batch_tokens", "batch_sentences")}
    changes = {key: None if limit is None else factor * limit for key, limit in limits.items()}
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _attention_size(trainer: Trainer, indices: Indices) -> int:
    """Return B x T x S of a batch: the number of its attention weights.

    All batches have about the same number of tokens, so that the batch with most weights takes most memory.
    """
    split = trainer.batches.split
    return len(indices) * int(split.source.lengths_of(indices).max()) * int(split.target.lengths_of(indices).max())


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
    longest translation, and an untrained model would end translations at arbitrary lengths.
    """
    split, translator = setup.corpus.splits["validation"], setup.translator
    start = max(0, len(split) - PAIRS) // 2
    pairs = np.argsort(split.source.lengths, kind="stable")[start : start + PAIRS]  # around the median source length
    length = int(split.target.lengths_of(pairs).max())
    lengths = {"min_length": length, "max_length": length}
    translator.use_search(translator.settings.model_copy(update=lengths))
    setup.validator(pairs)  # not timed, because it also prepares the model for search
    began = time.perf_counter()
    setup.validator(pairs)
    return (time.perf_counter() - began) / len(pairs)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: the memory reserved by torch on a CUDA GPU, else that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def cost_report(setup: Setup, costs: Costs, peak: int, ideal: float) -> list[str]:
    """Write the lines that tell the user how much time and memory the run would take.

    ideal: see `ideal_seconds`.
    """
    trainer, splits, config = setup.trainer, setup.corpus.splits, setup.job.config
    epoch, total = len(trainer.batches.epoch(0)), trainer.total_steps
    validations = validations_of(config, epoch, total)
    validation = len(splits["validation"]) * costs.pair
    seconds = costs.preparation + total * costs.update + validations * validation
    seconds += sum(len(split) for split in setup.held_out) * costs.pair
    group, device = setup.job.group, setup.job.machine.device
    kind = "GPU memory" if device.type == "cuda" else "memory"
    return [
        f"model: {setup.parameters:,} parameters",
        f"{kind}: {peak / GIB:.2f} GiB at peak{f', in each of {group.size} processes' if group.size > 1 else ''}",
        f"update: {duration(costs.update)}, {costs.tokens / costs.update:,.0f} target tokens per second",
        f"utilisation: {costs.tokens * ideal / (costs.update * group.size):.0%} of the rate of a large matrix product",
        batch_line(config, costs.rates),
        f"epoch: {duration(epoch * costs.update)} (updates: {epoch:,})",
        f"validation: {duration(validation)}",
        f"run: {'at most ' if config.validation.patience else ''}{duration(seconds)} (updates: {total:,}, "
        f"epochs: {total / epoch:.3g}, validations: {validations}, and the final evaluation)",
        "dry run: found no errors, and leaves nothing behind",
    ]


def batch_line(config: schema.TrainConfig, rates: Sequence[float]) -> str:
    """Write the line that names the smallest batch with half of the best rate, and all measured rates."""
    sizes = [with_batches_of(config, 2**power).training for power in range(len(rates))]
    enough = sizes[next(power for power, rate in enumerate(rates) if rate >= max(rates) / 2)]
    measured = ", ".join(f"{rate:,.0f} with {size.batch_tokens:,}" for size, rate in zip(sizes, rates, strict=True))
    sentences = "null" if enough.batch_sentences is None else enough.batch_sentences
    return (
        f"batch: training.batch_tokens={enough.batch_tokens} training.batch_sentences={sentences} reaches half of the "
        f"best measured rate (target tokens per second: {measured})"
    )


def validations_of(config: schema.TrainConfig, epoch: int, total: int) -> int:
    """Count the validations of a run that patience does not end early.

    epoch: number of updates per epoch; total: number of updates of the run.
    """
    training, validation = config.training, config.validation
    interval = validation.every * (1 if validation.unit == "steps" else epoch)
    return math.ceil(total / interval) + (training.start_from is not None)


def duration(seconds: float) -> str:
    """Format a duration below a minute as seconds with three significant digits, else like human_duration."""
    return f"{seconds:.3g} s" if seconds < MINUTE else human_duration(seconds)
