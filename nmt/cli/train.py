"""nmt-train: train, evaluate, draw alignments."""

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nmt.cli import arguments, dry_run, sweep
from nmt.cli.app import choices, output_dir, run_command
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.compose import PATH_KEYS, flatten, validated, with_values
from nmt.config.errors import UserError
from nmt.config.overrides import for_shell
from nmt.config.schema import TrainConfig
from nmt.system.processes import rank, started_in_group
from nmt.system.saved_config import load_values

log = logging.getLogger(__name__)
PATH_GROUPS = {"data", "tokenizer", "objective", "experiment"}  # groups that determine which of PATH_KEYS exist


def main() -> None:
    """Entry point."""
    # Overrides of PATH_KEYS for a run to resume: its saved configuration has these keys, but Hydra's may lack them.
    paths = []
    keys = {argument.partition("=")[0]: argument for argument in sys.argv[1:]}
    run = arguments.value_of(keys["run"]) if "run" in keys else None
    if run is not None and os.path.isfile(os.path.expanduser(f"{run}/config.yaml")) and not keys.keys() & PATH_GROUPS:
        paths = [argument for argument in sys.argv[1:] if argument.partition("=")[0] in PATH_KEYS]
        sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in paths]
    if arguments.DRY_RUN in sys.argv[1:]:
        dry_run.main()
    else:
        run_command("train", TrainConfig, partial(_train, paths=paths), sweep)


def _train(config: TrainConfig, overrides: list[str], paths: list[str]) -> int:
    from nmt.data.prepare.prepare import fingerprint_of
    from nmt.system.run import FINISHED, PRUNED, RunDirectory

    directory, chosen = output_dir(), {} if config.run else choices()  # those of a resumed run are its first start's
    if started_in_group():
        _check_group(overrides)
    if sweep.sweeping():
        if config.run is not None:
            raise UserError(f"run={config.run} resumes a single run; resume a sweep with hydra.sweep.dir=DIR")
        config = config.model_copy(update={"threads": config.threads or sweep.job_threads()})
        RunDirectory(directory).wait_until_free(sweep.MAX_WAIT)
    else:
        sweep.refuse_sweep_options()
    if config.run is not None:
        paths = arguments.prepared(paths, TrainConfig)
        directory, config = _resumed(config, overrides, paths)
    config = config.with_absolute_paths()
    run = RunDirectory(directory)
    run.check_contained()
    # A run that a sweep pruned is complete for the sweep, but can be resumed as a single run. Its corpus is read last,
    # since that may take long.
    complete = run.status() in ({FINISHED, PRUNED} if sweep.sweeping() else {FINISHED})
    if complete and run.has_finished(config.model_dump(mode="json"), fingerprint_of(config.data, config.tokenizer)):
        log.info("already finished: skipped")
        status = 0
    else:
        with exit_at_ctrl_c("train"):
            from nmt.cli.launch import train_in_processes
            from nmt.training.job import train

        observer = sweep.observer() if sweep.sweeping() else None
        launch = train_in_processes if config.processes > 1 and not started_in_group() else train
        status = launch(config, directory, [*overrides, *paths], chosen, observer)
    if not sweep.sweeping() and rank() == 0:
        _print_next_steps(os.path.relpath(directory), config.data.direction_arguments)
    return status


def _check_group(overrides: list[str]) -> None:
    """Raises UserError for options that several processes do not support."""
    if any(override.startswith("processes=") for override in overrides):
        raise UserError("processes=: several processes were started already; leave it out")
    if sweep.sweeping() and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep cannot run under torchrun; give its jobs several processes with processes=N")


def _print_next_steps(run: str, direction: Mapping[str, str]) -> None:
    """Where the pictures are, how to look at the run and to translate with it in this direction, and last its
    directory."""
    commands = {
        name: name if shutil.which(name) else Path(sys.executable).with_name(name)
        for name in ("tensorboard", "nmt-translate")
    }
    if os.path.isdir(os.path.join(run, "alignments")):
        print(f"alignments: {os.path.join(run, 'alignments')}")
    if os.path.isdir(os.path.join(run, "tensorboard")):
        print(f"tensorboard: {commands['tensorboard']} --logdir {shlex.quote(run)} --host localhost")
    words = [for_shell(key, value) for key, value in [("run", run), *direction.items()]]
    print(f"translate: {commands['nmt-translate']} {' '.join(words)}")
    print(f"run: {run}")


def _resumed(config: TrainConfig, overrides: list[str], paths: list[str]) -> tuple[Path, TrainConfig]:
    """The directory of the run to resume, and its saved configuration with the overrides that may change it."""
    from nmt.system.run import CHANGEABLE, RunDirectory

    run = RunDirectory.existing(str(config.run))
    values = dict(flatten(config.model_dump(mode="json")))
    changes = {}
    for override in overrides:
        key = override.partition("=")[0]
        if key == "run":
            continue
        if key not in CHANGEABLE:
            raise UserError(
                f"{override}: run={config.run} resumes with its saved configuration; only these keys may change: "
                f"{', '.join(sorted(CHANGEABLE - {'run'}))}"
            )
        changes[key] = values[key]
    if "NMT_CACHE" in os.environ and "data.cache_dir" not in run.overrides():
        changes["data.cache_dir"] = values["data.cache_dir"]
    for path in arguments.check(paths, "train"):
        if path.is_sweep_override():
            raise UserError(f"{path.input_line}: several values need a sweep; run= resumes a single run")
        changes[str(path.key_or_group)] = path.value()
    return run.path, validated(TrainConfig, with_values(load_values(run.config), changes))
