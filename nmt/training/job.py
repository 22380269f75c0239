"""One training job: prepare, train, evaluate, record."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell
from nmt.config.schema.training import Validation
from nmt.data.prepare.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.evaluate.bleu import ScoreSettings
from nmt.evaluate.evaluation import evaluate_run
from nmt.model.checkpoints import BEST, LAST, load_weights, new_model
from nmt.system.contention import fair_waiting
from nmt.system.distributed import Interrupted, ProcessGroup
from nmt.system.machine import Machine, tune_memory
from nmt.system.run import FINISHED, PRUNED, RunDirectory, read_json
from nmt.training.journal import Journal, SilentJournal, record_outcome, save_figures
from nmt.training.logs.corpus_report import log_corpus_report, report_round_trips
from nmt.training.logs.run_log import log_of_others, log_to_file
from nmt.training.logs.trackers import Tracker, check_packages, close_trackers, open_trackers, writes_tensorboard
from nmt.training.losses.auxiliary import CoverageLoss
from nmt.training.losses.objective import Objective
from nmt.training.start import Start, load_start, load_teachers
from nmt.training.trainer import Observer, Pruned, Trainer
from nmt.training.validation import Scoring, pick_samples
from nmt.translate.translator import Translator

log = logging.getLogger(__name__)
MIN_SHARE = 512  # tokens of a batch that are worth a process


class TrainingSetup(NamedTuple):
    """All that a run needs before its first update."""

    config: schema.TrainConfig
    run: RunDirectory
    prepared: Prepared
    scoring: Scoring
    trainer: Trainer

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.trainer.model.parameters())


Work = Callable[[TrainingSetup], int]
"""Called with the setup of a run; returns the exit status."""


def train(
    config: schema.TrainConfig,
    directory: Path,
    overrides: list[str],
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
    work: Work | None = None,
) -> int:
    """Train in `directory`, or resume the run there. Returns the exit status: 0, or 128 + the signal that stopped it.

    The manifest records `overrides` and `choices` (of each group), which led to the configuration. A run that the
    `observer` prunes is not evaluated. `work`: done in place of training and evaluation.
    """
    tune_memory()
    machine = Machine.choose(config.device, config.precision, config.threads)
    run = RunDirectory(directory)
    with fair_waiting(), ProcessGroup.join() as group, log_of_others(group, run.log):
        return _train_in_group(config, run, machine, group, overrides, choices or {}, observer, work or _train)


def _train_in_group(
    config: schema.TrainConfig,
    run: RunDirectory,
    machine: Machine,
    group: ProcessGroup,
    overrides: list[str],
    choices: Mapping[str, str],
    observer: Observer | None,
    work: Work,
) -> int:
    group.refuse_differences(str(run.path.absolute()), "hydra.run.dir: differs from that of the main process; name one")
    group.everywhere(lambda: check_packages(config.logger))
    scoring = group.everywhere(partial(Scoring.choose, config, machine.device, group.is_main))
    values = config.model_dump(mode="json")
    group.on_main(lambda: run.claim(values))
    try:
        prepared = group.main_first(lambda: prepare(config.data, config.tokenizer))
        group.refuse_differences(
            prepared.report["content"], "data: another corpus than that of the main process; give all machines the same"
        )
        group.on_main(lambda: report_round_trips(prepared, config, scoring.settings))
        resumed = group.on_main((run.checkpoints / LAST).exists)
        start = None if resumed else group.everywhere(lambda: load_start(config, prepared))
        recorded = run.first_start().get("teachers", []) if resumed else []
        teachers = group.everywhere(lambda: load_teachers(config, prepared, machine, recorded))
        record: dict[str, Any] = {"overrides": overrides, "choices": choices, "machine": machine.describe()}
        record["machine"]["processes"] = group.size
        if start is not None:
            record |= start.record
        if teachers.records:
            record["teachers"] = teachers.records
        group.on_main(lambda: run.begin(values, prepared, record))
        group.everywhere(lambda: _refuse_unshared(run))
        with log_to_file(run.log) if group.is_main else nullcontext():
            log_corpus_report(prepared)
            _warn_of_small_shares(config, group)
            translator = _new_translator(config, prepared, machine, start, group)
            objective = Objective(translator.single, config, prepared.tokenizers.target, teachers.models)
            trainer = Trainer(config, prepared, translator, scoring, run, objective, observer)
            setup = TrainingSetup(config, run, prepared, scoring, trainer)
            _log_model(setup)
            _warn_of_no_effect(config, objective, trainer.total_steps)
            return work(setup)
    finally:
        run.release()


def _refuse_unshared(run: RunDirectory) -> None:
    if not run.config.is_file():
        raise UserError(f"{run.path}: not on this machine; put the run on a file system that all machines share")


def _warn_of_small_shares(config: schema.TrainConfig, group: ProcessGroup) -> None:
    share = config.training.batch_tokens // group.size
    if group.size > 1 and share < MIN_SHARE:
        log.warning(
            "training.batch_tokens=%d: each of %d processes gets %d tokens of a batch, too few to be worth a process; "
            "training.batch_tokens=%d would suit them",
            config.training.batch_tokens,
            group.size,
            share,
            MIN_SHARE * group.size,
        )


def _new_translator(
    config: schema.TrainConfig, prepared: Prepared, machine: Machine, start: Start | None, group: ProcessGroup
) -> Translator:
    """A translator with a new model, with random weights or those of `start`."""
    torch.manual_seed(config.seed)
    model = new_model(config, prepared.tokenizers)
    if start is not None:
        model.load_state_dict(start.weights)
        for line in start.description:
            log.info("%s", line)
    model = model.to(machine.device)
    return Translator(model, prepared.tokenizers, config.search, machine, config.seed, group)


def _log_model(setup: TrainingSetup) -> None:
    group, machine = setup.trainer.group, setup.trainer.translator.machine
    log.info(
        "model: %s parameters; %s in %s, threads: %d%s",
        f"{setup.parameters:,}",
        machine.device,
        machine.precision,
        machine.describe()["threads"],
        f", processes: {group.size}" if group.size > 1 else "",
    )


def _train(setup: TrainingSetup) -> int:
    config, run, _, _, trainer = setup
    trackers: list[Tracker] = []
    trainer.group.on_main(lambda: trackers.extend(open_trackers(config, run)))
    status = 1
    try:
        status = _train_and_evaluate(setup, trackers)
    finally:
        close_trackers(trackers, finished=status == 0)
    return status


def _train_and_evaluate(setup: TrainingSetup, trackers: Sequence[Tracker]) -> int:
    config, run, prepared, scoring, trainer = setup
    group = trainer.group
    if group.everywhere(trainer.resume):
        log.info("resumed at step %d of %d", trainer.step, trainer.total_steps)
        if trainer.schedule_has_moved and config.schedule.kind == "cosine" and trainer.step < trainer.total_steps:
            log.warning("the number of updates has changed, and the cosine schedule with it: the learning rate jumps")
    status: dict[str, str] = {}
    tensorboard = writes_tensorboard(config.logger)
    journal = partial(Journal, run, tensorboard, trackers) if group.is_main else SilentJournal
    try:
        with logging_redirect_tqdm([logging.getLogger("nmt")]):
            trainer.fit(journal)
    except Interrupted as stop:
        log.info("stopped by %s at step %d; resume with: nmt-train %s", stop, trainer.step, for_shell("run", run.path))
        return 128 + stop.signum
    except Pruned:
        log.info("pruned at step %d: other runs of the sweep are more promising", trainer.step)
        status = {"status": PRUNED}
        return 0
    finally:
        if group.is_main and run.manifest.exists():
            run.update_json(run.manifest, {"parameters": setup.parameters, "training": _summary(trainer), **status})
    if trainer.stopping.best is None and trainer.stopping.waited:
        raise UserError(
            f"validation.monitor={config.validation.monitor}: no validation had a finite score, so there is no best "
            "checkpoint; a smaller optimizer.lr may help"
        )
    _evaluate(run, trainer.translator, prepared, scoring.settings, config.validation)
    splits = prepared.splits.keys() - {"train"}
    group.on_main(lambda: _finish(run, trainer.step, splits, tensorboard, trackers))
    return 0


def _finish(
    run: RunDirectory, step: int, splits: Iterable[str], tensorboard: bool, trackers: Sequence[Tracker]
) -> None:
    record_outcome(run, tensorboard, trackers, step, _results(run, splits))
    run.update_json(run.manifest, {"status": FINISHED})


def _warn_of_no_effect(config: schema.TrainConfig, objective: Objective, total_steps: int) -> None:
    """Warn of values that take effect only after the end of the run, or not at all."""
    for loss in objective.auxiliary:
        if isinstance(loss, CoverageLoss) and loss.start >= total_steps:
            log.warning("attention.coverage.loss_start=%d: the run ends before, at step %d", loss.start, total_steps)
    if config.schedule.warmup_steps > total_steps:
        text = "schedule.warmup_steps=%d: the run ends before, at step %d, and never reaches optimizer.lr"
        log.warning(text, config.schedule.warmup_steps, total_steps)
    if config.training.r_drop and not config.passes_differ:
        text = "training.r_drop=%g: two equal passes, because no dropout is set; it only takes time"
        log.warning(text, config.training.r_drop)
    steps = config.training.scheduled_sampling_steps
    if config.training.scheduled_sampling and steps > total_steps:
        log.warning("training.scheduled_sampling_steps=%d: the run ends before, at step %d", steps, total_steps)


def _results(run: RunDirectory, splits: Iterable[str]) -> dict[str, float]:
    """The scores of each split with the best checkpoint, under names such as "best/test_bleu"."""
    results = read_json(run.results)
    return {
        f"best/{split}_{key}": results[split][key]
        for split in splits
        for key in ("bleu", "chrf", "ter", "aer")
        if results.get(split, {}).get(key) is not None
    }


def _summary(trainer: Trainer) -> dict[str, Any]:
    average = trainer.best.average
    return {
        "steps": trainer.step,
        "epochs": round(trainer.epoch + trainer.position / len(trainer.plan), 3),
        "seconds": round(trainer.seconds, 1),
        "target_tokens": trainer.tokens,
        "target_tokens_per_second": round(trainer.tokens / max(trainer.seconds, 1e-9), 1),
        "bad_steps": trainer.bad.count,
        "best_step": trainer.stopping.best_step,
        f"best_{trainer.stopping.monitor}": average.score if average and average.taken else trainer.stopping.best,
        **({"average": average._asdict()} if average else {}),
    }


def _evaluate(
    run: RunDirectory, translator: Translator, prepared: Prepared, scoring: ScoreSettings, config: Validation
) -> None:
    """Evaluate the best checkpoint on every held-out split: scores, translations, heatmaps."""
    group = translator.group
    group.wait()  # until the checkpoint is written
    group.on_main(run.check_present)
    load_weights(translator.single, run.checkpoints / BEST)
    for split in prepared:
        if split.name == "train":
            continue
        with tqdm(
            total=len(split),
            desc=f"translate {split.name}",
            unit=" sent",
            disable=group.hides_progress,
            leave=False,
        ) as bar:
            result, evaluation = evaluate_run(run, translator, split.name, scoring, "best", bar.update)
        aer = f"  AER {100 * result['aer']:.1f} %" if "aer" in result else ""
        log.info(
            "%s: BLEU %.2f  chrF %.2f  TER %.2f%s  (%s)",
            split.name,
            result["bleu"],
            result["chrf"],
            result["ter"],
            aer,
            result["signature"],
        )
        texts = split.source.lines(), split.target.lines()
        if group.is_main:
            save_figures(run.alignments / split.name, pick_samples(translator, *texts, evaluation.translations, config))
