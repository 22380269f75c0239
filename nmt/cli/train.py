"""nmt-train: train, evaluate, draw alignments."""

import logging
import os
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

from nmt.cli import sweep, words
from nmt.cli.app import choices, output_dir, run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.compose import PATH_KEYS, flatten, load_values, typed, with_values
from nmt.config.errors import UserError
from nmt.config.schema import TrainConfig

log = logging.getLogger(__name__)
CHOOSING = {"data", "tokenizer", "objective", "experiment"}  # groups that say what PATH_KEYS there are


def main() -> None:
    """Entry point."""
    places = []
    given = {word.partition("=")[0]: word for word in sys.argv[1:]}
    resumed = "run" in given and os.path.isfile(os.path.expanduser(f"{words.value_of(given['run'])}/config.yaml"))
    if resumed and not given.keys() & CHOOSING:
        places = [word for word in sys.argv[1:] if word.partition("=")[0] in PATH_KEYS]
        sys.argv[1:] = [word for word in sys.argv[1:] if word not in places]
    run_command("train", TrainConfig, partial(_train, places=places), sweep)


def _train(config: TrainConfig, overrides: list[str], places: list[str]) -> int:
    from nmt.data.prepare import fingerprint_of
    from nmt.run import FINISHED, PRUNED, RunDirectory

    directory = output_dir()
    if not sweep.sweeping():
        sweep.refuse_outside_a_sweep()
    else:
        if config.run is not None:
            raise UserError(f"run={config.run} goes on with one run; a sweep goes on with hydra.sweep.dir=DIR")
        config = config.model_copy(update={"threads": config.threads or sweep.job_threads()})
        RunDirectory(directory).wait_until_free(sweep.LONGEST_END)
    if config.run is not None:
        places = [words.with_home(word) for word in places]
        directory, config = _resumed(config, overrides, places)
    config = config.with_absolute_paths()
    found = RunDirectory(directory)
    found.check_contained()
    # What a sweep has pruned goes on by hand. Of a run that is not at its end the corpus is not read for this.
    at_its_end = found.status() in ({FINISHED, PRUNED} if sweep.sweeping() else {FINISHED})
    if at_its_end and found.has_finished(config.model_dump(mode="json"), fingerprint_of(config.data, config.tokenizer)):
        log.info("finished before: skipped")
        status = 0
    else:
        with exit_at_ctrl_c("train"):
            from nmt.training.job import train

        observer = sweep.observer() if sweep.sweeping() else None
        status = train(config, directory, [*overrides, *places], choices(), observer)
    if sweep.sweeping():
        return status  # the sweep tells in the end
    here = os.path.relpath(directory)
    board = "tensorboard" if shutil.which("tensorboard") else Path(sys.executable).with_name("tensorboard")
    print(f"tensorboard: {board} --logdir {shlex.quote(here)} --host localhost")
    print(f"run: {here}")
    return status


def _resumed(config: TrainConfig, overrides: list[str], places: list[str]) -> tuple[Path, TrainConfig]:
    """The directory of the run to resume, and its saved configuration with the overrides that may change it."""
    from nmt.run import CHANGEABLE, RunDirectory

    run = RunDirectory.existing(str(config.run))
    given = [override for override in overrides if not override.startswith("run=")]
    for override in given:
        if override.partition("=")[0] not in CHANGEABLE:
            raise UserError(
                f"{override}: run={config.run} goes on with the configuration saved there; only these may change: "
                f"{', '.join(sorted(CHANGEABLE - {'run'}))}"
            )
    now = dict(flatten(config.model_dump(mode="json")))
    changed = {key: now[key] for key in (override.partition("=")[0] for override in given)}
    if "NMT_CACHE" in os.environ and "data.cache_dir" not in run.overrides():
        changed["data.cache_dir"] = now["data.cache_dir"]
    for moved in words.check(places, "train"):
        if moved.is_sweep_override():
            raise UserError(f"{moved.input_line}: several values are for a sweep, which run= is not")
        changed[str(moved.key_or_group)] = moved.value()
    return run.path, typed(TrainConfig, with_values(load_values(run.config), changed))
