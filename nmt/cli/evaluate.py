"""nmt-evaluate and nmt-compare: score a trained run, and rank several systems."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmt.cli.entry import exit_at_ctrl_c
from nmt.cli.launch import in_processes
from nmt.cli.run_command import run_configured
from nmt.config import schema
from nmt.config.errors import UserError, user_path
from nmt.system.files import short_name
from nmt.system.processes import leave_group

if TYPE_CHECKING:
    from nmt.evaluate.metrics import ScoreSettings
    from nmt.system.distributed import ProcessGroup
    from nmt.system.run import RunDirectory

MAX_NAME = 150  # characters of the settings in a file's name


def main() -> None:
    run_configured(
        "evaluate", schema.EvaluateConfig, lambda config: in_processes(config.processes, "evaluate", _evaluate, config)
    )


def compare_main() -> None:
    leave_group()  # processes of torchrun, if any, do not share this work
    run_configured("compare", schema.CompareConfig, _compare)


def _evaluate(config: schema.EvaluateConfig) -> None:
    with exit_at_ctrl_c("evaluate"):
        from nmt.system.distributed import ProcessGroup
        from nmt.system.machine import fair_waiting, tune_memory
    run = config.run[0] if len(config.run) == 1 else config.run
    tune_memory()
    with ProcessGroup.join() as group, fair_waiting():
        evaluate(config, group, lambda result: print(json.dumps({"run": run, "split": config.split, **result})))


def evaluate(
    config: schema.EvaluateConfig, group: "ProcessGroup", on_result: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Score a trained run, or an ensemble, on a split of its corpus; save the results, and return them.

    They go to `config.output`. By default, the results of one run go to its own directory, and those of an ensemble or
    an archive to a new folder below outputs/evaluate. Rank 0 calls `on_result` with the results before it saves them,
    so that results that cannot be saved are not lost. A progress bar is shown only if `on_result` is given. Raises
    UserError.
    """
    from tqdm.auto import tqdm

    from nmt.evaluate.evaluation import EvaluationFolder, evaluate_run, warn_if_texts_differ
    from nmt.system.run import EVALUATION, RunDirectory, load_config
    from nmt.translate.translator import Translator

    runs = [RunDirectory.existing(path) for path in config.run]
    trained = load_config(runs[0].config)
    settings = run_score_settings(config, trained)
    sentences = len(runs[0].held_out(config.split)[0])
    folder = _results_folder(config.output, runs)
    translator = group.everywhere(partial(Translator.load, config.run, **config.load_arguments, group=group))
    hidden = True if on_result is None else group.hides_progress
    with ExitStack() as stack:
        warn_if_texts_differ(runs, config.split)
        output, suffix = None, ""
        if folder is None:
            suffix = changed_settings(config, trained, runs[0].last_machine().get("precision"))
        else:
            opened = output_folder(folder, EVALUATION, "an evaluation")
            created = group.on_main(lambda: stack.enter_context(opened))
            output = EvaluationFolder.at(created, runs, translator, settings, config.checkpoint)
        bar = stack.enter_context(tqdm(total=sentences, desc=f"translate {config.split}", unit=" sent", disable=hidden))

        def tell(result: dict[str, Any]) -> None:
            bar.close()
            if on_result is not None and group.is_main:
                on_result(result if folder is None else {"output": folder, **result})

        result, _ = evaluate_run(
            runs[0],
            translator,
            config.split,
            settings,
            config.checkpoint,
            progress=bar.update,
            output=output,
            suffix=suffix,
            on_result=tell,
        )
    return result


def run_score_settings(config: schema.EvaluateConfig, trained: schema.TrainConfig) -> "ScoreSettings":
    """Return the score settings of a run, in which values from the command line replace those of training.

    Raises UserError for settings that sacreBLEU refuses.
    """
    from nmt.evaluate.evaluation import score_settings

    changes = {"metrics": config.metrics, "tokenize": config.tokenize, "lowercase": config.lowercase}
    evaluation = trained.evaluation.model_copy(update={k: v for k, v in changes.items() if v is not None})
    try:
        return score_settings(evaluation, trained.data.target_lang)
    except UserError as error:
        raise UserError(str(error).removeprefix("evaluation.")) from None


def _results_folder(output: str | None, runs: list["RunDirectory"]) -> str | None:
    """Choose the folder for the results of an evaluation; None stands for the directory of the only run.

    Raises UserError, before anything is translated, if results could not be written into that directory.
    """
    if output is not None:
        return output
    if len(runs) > 1 or runs[0].is_archive:  # the results belong to none of the runs
        return f"outputs/evaluate/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    for folder in (runs[0].path, runs[0].hypotheses, runs[0].alignments):
        if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise UserError(f"{folder}: cannot be written; give output=FOLDER to save the results elsewhere")
    return None


def changed_settings(config: schema.EvaluateConfig, trained: schema.TrainConfig, precision: str | None) -> str:
    """Return the settings that differ from those of training, such as "seed-2_beam_size-10", to name files and results.

    A name that is too long for a file is cut and ends in a digest of all settings. `precision` is that of training.
    """
    before = {"checkpoint": "best", "seed": trained.seed, "precision": precision, "shortlist": None}
    before |= {**trained.evaluation.model_dump(), **trained.search.model_dump()}
    names = ("checkpoint", "seed", "precision", "shortlist", "metrics", "tokenize", "lowercase")
    settings = {**{name: getattr(config, name) for name in names}, **config.search}
    changed = {k: v for k, v in settings.items() if v is not None and before.get(k) != v}
    texts = {key: "+".join(value) if isinstance(value, list) else value for key, value in changed.items()}
    return short_name("_".join(f"{key}-{text}" for key, text in texts.items()), MAX_NAME)


def _compare(config: schema.CompareConfig) -> None:
    table, folder = compare(config)
    print(table)
    print(f"page: {os.path.relpath(folder / 'index.html')}")


def compare(config: schema.CompareConfig) -> tuple[str, Path]:
    """Rank systems, test their differences for significance, show where they differ.

    Returns the table and the folder of all results. Raises UserError.
    """
    with exit_at_ctrl_c("compare"):
        from nmt.compare.report import write_comparison

    settings = config.model_dump(exclude={"output"})
    with output_folder(config.output, "comparison.json", "a comparison") as output:
        return write_comparison(output=output, **settings), output


@contextmanager
def output_folder(output: str, marker: str, content: str, option: str = "output=") -> Iterator[Path]:
    """Create the folder `output` if it is missing. If the body raises, remove new folders that are empty.

    Raises UserError if the folder cannot be created or written, or if it holds files but not `marker`, the file by
    which an earlier result is recognised. In messages, `option` names the argument and `content` the kind of result.
    """
    folder = user_path(output)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}{output}: is no folder and cannot be created ({error.strerror})") from None
    try:
        if any(folder.iterdir()) and not (folder / marker).is_file():
            raise UserError(f"{option}{output}: holds files other than {content}; name another folder")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{option}{output}: cannot be written; name another folder")
        yield folder
    except BaseException:
        with suppress(OSError):
            for path in created:
                path.rmdir()
        raise
