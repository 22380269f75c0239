"""nmt-evaluate: score a trained run, or an ensemble, on a split of its corpus."""

import json
import os
import re
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from nmt.cli.app import output_folder, run_command, shared_by_processes
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config import schema
from nmt.config.errors import UserError
from nmt.config.schema import EvaluateConfig

if TYPE_CHECKING:
    from nmt.evaluate.bleu import ScoreSettings
    from nmt.system.run import RunDirectory


def main() -> None:
    """Entry point."""
    run_command("evaluate", EvaluateConfig, shared_by_processes("evaluate", _evaluate))


def _evaluate(config: EvaluateConfig, overrides: list[str]) -> None:
    with exit_at_ctrl_c("evaluate"):
        from tqdm import tqdm

        from nmt.evaluate.evaluation import EvaluationFolder, evaluate_run, warn_if_texts_differ
        from nmt.system.contention import fair_waiting
        from nmt.system.distributed import ProcessGroup
        from nmt.system.machine import tune_memory
        from nmt.system.run import EVALUATION, RunDirectory
        from nmt.system.saved_config import load_config
        from nmt.translate.translator import Translator

    tune_memory()
    runs = [RunDirectory.existing(path) for path in config.run]
    trained = load_config(runs[0].config)
    settings = _score_settings(config, trained)
    sources, _, _ = runs[0].held_out(config.split)
    if config.output is None:
        if runs[0].is_archive:
            raise UserError(f"run={config.run[0]}: is an archive, which does not change; give output=FOLDER")
        _check_writable(runs[0])
    machine = runs[0].last_machine()
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        group = stack.enter_context(ProcessGroup.join())
        translator = group.everywhere(partial(Translator.load, config.run, **config.load_arguments, group=group))
        stack.enter_context(fair_waiting())
        warn_if_texts_differ(runs, config.split)
        output: EvaluationFolder | str
        if config.output is None:
            output, location = _variant(config, trained, machine.get("precision")), {}
        else:
            folder = output_folder(config.output, EVALUATION, "an evaluation")
            path = group.on_main(lambda: stack.enter_context(folder))
            output = EvaluationFolder.at(path, runs, translator, settings, config.checkpoint)
            location = {"output": config.output}
        bar = stack.enter_context(
            tqdm(total=len(sources), desc=f"translate {config.split}", unit=" sent", disable=group.hides_progress)
        )
        try:
            evaluate_run(
                runs[0],
                translator,
                config.split,
                settings,
                config.checkpoint,
                progress=bar.update,
                output=output,
                faithfulness_sentences=config.faithfulness_sentences if config.faithfulness else 0,
                on_result=result.update,
            )
        except OSError as error:
            if not result:
                raise
            raise UserError(
                f"{error.filename}: cannot be written ({error.strerror}); the scores are printed, but not saved: give "
                "output=FOLDER to save them elsewhere"
            ) from None
        finally:
            if result and group.is_main:
                bar.close()
                _print_result(config, {**location, **result}, len(sources))


def _score_settings(config: EvaluateConfig, trained: schema.TrainConfig) -> "ScoreSettings":
    """The run's settings, with those that the command changes. Raises UserError."""
    from nmt.evaluate.evaluation import score_settings

    changes = {"tokenize": config.tokenize, "lowercase": config.lowercase}
    evaluation = trained.evaluation.model_copy(update={k: v for k, v in changes.items() if v is not None})
    try:
        return score_settings(evaluation, trained.data.target_lang)
    except UserError as error:
        raise UserError(str(error).removeprefix("evaluation.")) from None


def _print_result(config: EvaluateConfig, result: dict[str, Any], sentences: int) -> None:
    if config.faithfulness:
        from nmt.explain.faithfulness import summary

        print(summary(result["faithfulness"], sentences))
    run = config.run[0] if len(config.run) == 1 else config.run
    print(json.dumps({"run": run, "split": config.split, **result}))


def _check_writable(run: "RunDirectory") -> None:
    """Raises UserError, before anything is translated, if the results could not be written."""
    for folder in (run.path, run.hypotheses, run.alignments):
        if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UserError(f"{folder}: cannot be written; give output=FOLDER to save the results elsewhere")


def _variant(config: EvaluateConfig, trained: schema.TrainConfig, precision: str | None) -> str:
    """The settings that differ from those of training, for the names of files and results. The run was trained in
    `precision`."""
    own = {"checkpoint": "best", "seed": trained.seed, "precision": precision, "shortlist": None}
    own |= {**trained.evaluation.model_dump(), **trained.search.model_dump()}
    names = ("checkpoint", "seed", "precision", "shortlist", "tokenize", "lowercase")
    settings = {**{name: getattr(config, name) for name in names}, **config.search}
    changed = {k: v for k, v in settings.items() if v is not None and own.get(k) != v}
    return re.sub(r"[^\w.-]", "-", "_".join(f"{key}-{value}" for key, value in changed.items()))
