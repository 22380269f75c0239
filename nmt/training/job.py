"""Runs a training job: set up, fit, evaluate.

All processes of a group run the same job. Work that only rank 0 may do, or that may fail on one process, goes through
`group.on_main`, `group.main_first` or `group.everywhere`, which raise the error of one process on all of them.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from nmt.config import schema
from nmt.config.errors import UserError, for_shell, user_path
from nmt.data.batching import make_batches
from nmt.data.prepare import prepare
from nmt.data.prepared_corpus import PreparedCorpus, Split
from nmt.evaluate.evaluation import evaluate_run, score_settings
from nmt.evaluate.metrics import METRICS, ScoreSettings, shown
from nmt.model.checkpoints import BEST, LAST, load_weights, new_model
from nmt.system.distributed import Interrupted, ProcessGroup
from nmt.system.machine import Machine, fair_waiting, tune_memory
from nmt.system.run import FINISHED, PRUNED, RunDirectory, read_json
from nmt.training.corpus_report import corpus_report, log_corpus_report
from nmt.training.journal import Journal, NullJournal, check_packages, log_to_file, save_figures
from nmt.training.loop import Observer, Pruned, TrainingLoop
from nmt.training.losses import Objective
from nmt.training.other_runs import InitialWeights, Teachers, load_initial_weights, load_teachers
from nmt.training.trainer import Trainer
from nmt.training.utilisation import ideal_seconds
from nmt.training.validation import Validator, pick_samples
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)


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
        setup = set_up(job, overrides, choices)
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


class Setup(NamedTuple):
    """All that trains, validates and evaluates a run."""

    job: Job
    corpus: PreparedCorpus
    settings: ScoreSettings
    translator: Translator
    trainer: Trainer
    validator: Validator

    @property
    def parameters(self) -> int:
        """Count the model's parameters."""
        return sum(parameter.numel() for parameter in self.trainer.model.parameters())


def set_up(job: Job, overrides: Sequence[str] = (), choices: Mapping[str, str] | None = None) -> Setup:
    """Claim the run directory, load all that the run needs, record how the run starts, and build the model and all that
    trains and validates it. Begins the run's log file; overrides, choices: as in `train_run`."""
    config, run, group = job.config, job.run, job.group
    values = config.model_dump(mode="json")
    # These checks come before anything is written.
    group.everywhere(lambda: check_packages(config.logger))
    settings = group.everywhere(
        lambda: score_settings(config.evaluation, config.data.target_lang, config.validation.monitor)
    )
    group.on_main(lambda: run.claim(values))
    corpus = group.main_first(lambda: prepare(config.data, config.tokenizer))
    group.refuse_differences(
        corpus.report["content"], "data: another corpus than that of rank 0; give all machines the same"
    )
    report = group.on_main(lambda: corpus_report(corpus, config, settings))
    resumed = group.on_main(lambda: _can_resume(run))
    initial = None if resumed else group.everywhere(lambda: load_initial_weights(config, corpus))
    recorded = run.first_start().get("teachers", []) if resumed else []
    teachers = group.everywhere(lambda: load_teachers(config, corpus, job.machine, recorded))

    start: dict[str, Any] = {"overrides": [*overrides], "choices": choices or {}}
    start["machine"] = {**job.machine.describe(), "processes": group.size}
    if initial is not None:
        start["start_from"] = initial.record
    if teachers.records:
        start["teachers"] = teachers.records

    def begin() -> None:
        run.begin(values, report, start)
        corpus.tokenizers.save(run.path)
        for split in corpus.held_out:
            run.write_held_out(split.name, split.source.lines(), split.target.lines(), split.alignments)

    group.on_main(begin)
    if group.largest(not run.config.is_file()):
        raise UserError(f"{run.path}: not on every machine; put the run on a file system that all machines share")
    if group.is_main:
        job.closing.enter_context(log_to_file(run.log))
    log_corpus_report(report)
    return _build(job, corpus, settings, initial, teachers)


def _can_resume(run: RunDirectory) -> bool:
    """Return whether the run has a checkpoint to resume from. Raises UserError if the run has ended and its checkpoint
    is gone: training anew would overwrite the best weights."""
    exists = (run.checkpoints / LAST).exists()
    if not exists and run.status() and (run.checkpoints / BEST).exists():
        raise UserError(
            f"{run.path}: has ended, and its checkpoints/{LAST} is gone, so that it cannot continue; measure it with "
            f"nmt-evaluate {for_shell('run', str(run.path))}, start a new run from its weights with "
            f"{for_shell('training.start_from', str(run.path))}, or delete it"
        )
    return exists


def _build(
    job: Job, corpus: PreparedCorpus, settings: ScoreSettings, initial: InitialWeights | None, teachers: Teachers
) -> Setup:
    """Build the model and all that trains and validates it. initial: None if the weights are random, or those of the
    last checkpoint."""
    config, machine, group = job.config, job.machine, job.group
    torch.manual_seed(config.seed)
    model = new_model(config, corpus.tokenizers)
    if initial is not None:
        model.load_state_dict(initial.weights)
        log.info("%s", initial.description)
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
        if loss.delay >= total_steps:
            log.warning("attention.coverage.loss_start=%d: the run ends before, at step %d", loss.delay, total_steps)
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
    group.on_main(run.check_present)  # waits until rank 0 has written the best checkpoint
    load_weights(setup.trainer.model, run.checkpoints / BEST)
    for split in setup.corpus.held_out:
        _evaluate_split(setup, split)
    group.on_main(lambda: _finish(setup, journal))


def _evaluate_split(setup: Setup, split: Split) -> None:
    """Evaluate the model on a held-out split, log its scores, and save heatmaps."""
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
        for split in setup.corpus.held_out
        for key in (*METRICS, "aer")
        if results.get(split.name, {}).get(key) is not None
    }
    journal.outcome(setup.trainer.step, scores)
    run.update_json(run.manifest, {"status": FINISHED})
