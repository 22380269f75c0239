"""One training job: prepare, train, evaluate, record."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from nmt.config import schema
from nmt.config.overrides import for_shell
from nmt.config.schema.training import Validation
from nmt.data.prepare import prepare
from nmt.data.prepared import Prepared
from nmt.evaluation import evaluate_run, score_settings
from nmt.machine import Machine, tune_memory
from nmt.metrics.bleu import ScoreSettings
from nmt.model.load import load_weights, new_model
from nmt.model.weights import BEST, LAST
from nmt.objectives.auxiliary import CoverageLoss
from nmt.objectives.objective import Objective
from nmt.report.tensorboard import TensorBoard
from nmt.run import FINISHED, PRUNED, RunDirectory, read_json
from nmt.training import checkpoint
from nmt.training.corpus_report import log_corpus_report, report_round_trips
from nmt.training.journal import save_figures
from nmt.training.signals import Interrupted
from nmt.training.start import Start, Teachers, load_start, load_teachers
from nmt.training.trainer import Observer, Pruned, Trainer
from nmt.training.validation import pick_samples
from nmt.translator import Translator

log = logging.getLogger(__name__)


def train(
    config: schema.TrainConfig,
    directory: Path,
    overrides: list[str],
    choices: Mapping[str, str] | None = None,
    observer: Observer | None = None,
) -> int:
    """Train in `directory`, or resume the run there. Returns the exit status: 0, or 128 + the signal that stopped it.

    The manifest records `overrides` and `choices` (of each group), which led to the configuration. A run that the
    `observer` prunes is not evaluated.
    """
    tune_memory()
    machine = Machine.choose(config.device, config.precision, config.threads)
    scoring = score_settings(config.evaluation, config.data.target_lang)
    run = RunDirectory(directory)
    values = config.model_dump(mode="json")
    run.claim(values)
    try:
        prepared = prepare(config.data, config.tokenizer)
        report_round_trips(prepared, config, scoring)
        resumed = (run.checkpoints / LAST).exists()
        start = None if resumed else load_start(config, prepared)
        teachers = load_teachers(config, prepared, machine, run.first_start().get("teachers", []) if resumed else [])
        record: dict[str, Any] = {"overrides": overrides, "choices": choices or {}, "machine": machine.describe()}
        if start is not None:
            record["start_from"] = start.record
        if teachers.records:
            record["teachers"] = teachers.records
        run.begin(values, prepared, record)
        with _log_to(run.log):
            log_corpus_report(prepared)
            return _train(config, run, prepared, machine, scoring, observer, start, teachers)
    finally:
        run.release()


def _train(
    config: schema.TrainConfig,
    run: RunDirectory,
    prepared: Prepared,
    machine: Machine,
    scoring: ScoreSettings,
    observer: Observer | None,
    start: Start | None,
    teachers: Teachers,
) -> int:
    checkpoint.seed_everything(config.seed)
    model = new_model(config, prepared.tokenizers)
    if start is not None:
        model.load_state_dict(start.weights)
        log.info("initial weights: step %d of %s", start.record["step"], start.record["run"])
    model = model.to(machine.device)
    translator = Translator(model, prepared.tokenizers, config.search, machine, config.seed)
    objective = Objective(model, config, prepared.tokenizers.target, teachers.models)
    trainer = Trainer(config, prepared, translator, scoring, run, objective, observer)
    resumed = trainer.resume()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "model: %s parameters; %s in %s, threads: %d",
        f"{parameters:,}",
        machine.device,
        machine.precision,
        machine.describe()["threads"],
    )
    if resumed:
        log.info("resumed at step %d of %d", trainer.step, trainer.total_steps)
        if trainer.schedule_has_moved and config.schedule.kind == "cosine" and trainer.step < trainer.total_steps:
            log.warning("the number of updates has changed, and the cosine schedule with it: the learning rate jumps")
    _warn_of_unreached(config, objective, trainer.total_steps)
    status: dict[str, str] = {}
    try:
        with logging_redirect_tqdm([logging.getLogger("nmt")]):
            trainer.fit()
    except Interrupted as stop:
        log.info("stopped by %s at step %d; resume with: nmt-train %s", stop, trainer.step, for_shell("run", run.path))
        return 128 + stop.signum
    except Pruned:
        log.info("pruned at step %d: other runs of the sweep are more promising", trainer.step)
        status = {"status": PRUNED}
        return 0
    finally:
        run.update_json(run.manifest, {"parameters": parameters, "training": _summary(trainer), **status})
    _evaluate(run, translator, prepared, scoring, config.validation)
    # At a step after all others, so that a run that is made longer removes its old results.
    with TensorBoard(run.tensorboard, resume_step=trainer.step) as board:
        board.outcome(trainer.step + 1, _results(run, prepared.splits.keys() - {"train"}))
    run.update_json(run.manifest, {"status": FINISHED})
    return 0


def _warn_of_unreached(config: schema.TrainConfig, objective: Objective, total_steps: int) -> None:
    """Warn of values that take effect only after the end of the run."""
    for loss in objective.auxiliary:
        if isinstance(loss, CoverageLoss) and loss.start >= total_steps:
            log.warning("attention.coverage.loss_start=%d: the run ends before", loss.start)
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
        "bad_steps": trainer.bad_steps,
        "best_step": trainer.stopping.best_step,
        f"best_{trainer.stopping.monitor}": average.score if average and average.taken else trainer.stopping.best,
        **({"average": average._asdict()} if average else {}),
    }


def _evaluate(
    run: RunDirectory, translator: Translator, prepared: Prepared, scoring: ScoreSettings, config: Validation
) -> None:
    """Evaluate the best checkpoint on every held-out split: scores, translations, heatmaps."""
    load_weights(translator.single, run.checkpoints / BEST)
    for split in prepared:
        if split.name == "train":
            continue
        with tqdm(total=len(split), desc=f"translate {split.name}", unit=" sent", disable=None, leave=False) as bar:
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
        save_figures(run.alignments / split.name, pick_samples(translator, *texts, evaluation.translations, config))


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Let a full disk end the run, as for every other file, instead of printing a traceback for each line."""
        raise  # noqa: PLE0704


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Copy all log messages to the run's train.log, with the time."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("nmt")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
