"""nmt-train: train, evaluate, draw alignments; with --dry-run, only find mistakes and estimate the cost of a run."""

import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NoReturn

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.cli import sweep
from nmt.cli.app import STOPPED, check_surroundings, choices, output_dir, run_command
from nmt.cli.compose import DRY_RUN, check, value_of, with_texts_quoted
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.compose import flatten, validated, with_values
from nmt.config.errors import UserError, for_shell, user_path
from nmt.config.schema import TrainConfig
from nmt.config.schema.commands import CHANGEABLE_KEYS, PATH_KEYS
from nmt.system.processes import rank, started_in_group
from nmt.system.run import FINISHED, PRUNED, RunDirectory, load_config, load_values

PATH_GROUPS = {"data", "tokenizer", "objective", "experiment"}  # groups that determine which of PATH_KEYS exist
log = logging.getLogger(__name__)


def main() -> None:
    arguments = [argument.removeprefix("++") for argument in sys.argv[1:] if argument != DRY_RUN]
    keys = {argument.partition("=")[0]: argument for argument in arguments}
    run = value_of(keys["run"]) if "run" in keys else None
    # If a run is resumed, Hydra does not get the overrides of PATH_KEYS: the run's saved configuration has these keys,
    # but the configuration that Hydra composes may lack them.
    paths = []
    if run is not None and os.path.isfile(os.path.expanduser(f"{run}/config.yaml")) and not keys.keys() & PATH_GROUPS:
        paths = [argument for argument in arguments if argument.partition("=")[0] in PATH_KEYS]
        arguments = [argument for argument in arguments if argument not in paths]
    if DRY_RUN in sys.argv[1:]:
        _main_of_dry_run(arguments)
    else:
        run_command("train", TrainConfig, partial(_train, paths=paths), sweep, arguments=arguments)


def _train(config: TrainConfig, overrides: list[str], paths: list[str]) -> int:
    directory, chosen = output_dir(), {} if config.run else choices()  # a resumed run has recorded its choices already
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
        paths = with_texts_quoted(paths, TrainConfig)
        directory, config = resumed(config, overrides, paths)
    config = config.with_absolute_paths()
    run = RunDirectory(directory)
    run.check_contained()
    # A run that a sweep pruned is complete for the sweep, but can be resumed as a single run.
    if is_complete(run, config, {FINISHED, PRUNED} if sweep.sweeping() else {FINISHED}):
        log.info("already finished: skipped")
        status = 0
    else:
        with exit_at_ctrl_c("train"):
            from nmt.training.job import train

        observer = sweep.observer() if sweep.sweeping() else None
        status = _in_processes(train, config, directory, [*overrides, *paths], chosen, observer)
    if not sweep.sweeping() and rank() == 0:
        _print_next_steps(os.path.relpath(directory))
    return status


def _in_processes(job: Callable[..., int], config: TrainConfig, *arguments: object) -> int:
    """Run the job in config.processes processes. Returns the exit status."""
    if config.processes == 1 or started_in_group():
        return job(config, *arguments)
    from nmt.cli.launch import in_processes

    return in_processes(config.processes, "train", job, config, *arguments)


def _check_group(overrides: list[str]) -> None:
    """Raises UserError for options that several processes do not support."""
    if any(override.startswith("processes=") for override in overrides):
        raise UserError("processes=: several processes were started already; leave it out")
    if sweep.sweeping() and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep cannot run under torchrun; give its jobs several processes with processes=N")


def _print_next_steps(run: str) -> None:
    """Print the folder of pictures, the commands to watch the run and to translate with it, and the run's directory."""
    commands = {
        name: name if shutil.which(name) else Path(sys.executable).with_name(name)
        for name in ("tensorboard", "nmt-translate")
    }
    if os.path.isdir(os.path.join(run, "alignments")):
        print(f"alignments: {os.path.join(run, 'alignments')}")
    if os.path.isdir(os.path.join(run, "tensorboard")):
        print(f"tensorboard: {commands['tensorboard']} --logdir {shlex.quote(run)} --host localhost")
    print(f"translate: {commands['nmt-translate']} {for_shell('run', run)}")
    print(f"run: {run}")


def is_complete(run: RunDirectory, config: TrainConfig, ended: Collection[str]) -> bool:
    """Return whether the run has ended with this configuration and corpus; `ended` lists statuses of ended runs."""
    from nmt.data.prepare import fingerprint_of

    if run.status() not in ended:
        return False  # before `fingerprint_of`, which reads the corpus and may take long
    return run.has_finished(config.model_dump(mode="json"), fingerprint_of(config.data, config.tokenizer))


def resumed(config: TrainConfig, overrides: list[str], paths: list[str]) -> tuple[Path, TrainConfig]:
    """Return the directory of the run to resume, and its saved configuration with the overrides applied.

    `paths` are overrides of PATH_KEYS. Raises UserError for an override of a key that may not change.
    """
    run = RunDirectory.existing(str(config.run))
    load_config(run.config)  # a mistake in the file is reported with its path
    values = dict(flatten(config.model_dump(mode="json")))
    changes = {}
    for override in overrides:
        key = override.partition("=")[0]
        if key == "run":
            continue
        _resolved(override, override)
        if key not in CHANGEABLE_KEYS:
            raise UserError(
                f"{override}: run={config.run} resumes with its saved configuration; only these keys may change: "
                f"{', '.join(sorted(CHANGEABLE_KEYS - {'run'}))}"
            )
        changes[key] = values[key]
    if "NMT_CACHE" in os.environ and "data.cache_dir" not in run.overrides():
        changes["data.cache_dir"] = values["data.cache_dir"]
    for path in check(paths, "train"):
        if path.is_sweep_override():
            raise UserError(f"{path.input_line}: several values need a sweep; run= resumes a single run")
        changes[str(path.key_or_group)] = _resolved(str(path.input_line), path.value())
    return run.path, validated(TrainConfig, with_values(load_values(run.config), changes))


def _resolved(override: str, value: object) -> object:
    """Resolve ${oc.env:NAME} in a value. Raises UserError for references to other keys, whose saved values could differ
    from those that Hydra has composed."""
    try:
        return OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)["value"]  # type: ignore[index,call-overload]
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{override}: cannot be resolved when a run resumes ({reason}); give the value itself"
        ) from None


def _main_of_dry_run(arguments: list[str]) -> None:
    """Do a dry run in a temporary directory, which is removed unless SIGKILL ends the process."""
    check_surroundings("train")
    with exit_at_ctrl_c("train"):  # Ctrl-C during imports ends the process at once: the directory does not exist yet
        import nmt.training.job  # noqa: F401
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)
    named = [value_of(argument) for argument in arguments if argument.startswith("hydra.run.dir=")]
    with tempfile.TemporaryDirectory(prefix="nmt-dry-run-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # for the files of torch and of child processes
        task = partial(_dry_run, named=named[-1] if named else None)
        run_command("train", TrainConfig, task, sweep, Path(folder, "run"), arguments)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(STOPPED + number)


def _dry_run(config: TrainConfig, overrides: list[str], named: str | None) -> int:
    """Try what a run in the directory `named` would do, but write to Hydra's directory, which is temporary."""
    from nmt.training.dry_run import dry_run

    sweep.refuse_sweep_options()
    if config.run is not None:
        raise UserError(f"--dry-run: tries a new run, but run={config.run} resumes one; leave one of them out")
    if started_in_group():
        raise UserError("--dry-run: several processes were started already; start one, with processes=N")
    config = config.with_absolute_paths()
    if named is not None and "${" not in named:
        RunDirectory(user_path(named).absolute()).check(config.model_dump(mode="json"))
    return _in_processes(dry_run, config, output_dir(), overrides, choices(), None)
