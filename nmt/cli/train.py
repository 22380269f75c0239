"""nmt-train: train, evaluate, draw alignments; with --dry-run, only find mistakes and estimate the cost of a run."""

import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmt.cli import sweep
from nmt.cli.app import DEBUG, STOPPED, run_command
from nmt.cli.compose import (
    SWEEP_KEYS,
    check,
    compose,
    composed,
    explained,
    of_job,
    parse_arguments,
    several_values,
    typed,
    value_of,
    with_texts_quoted,
)
from nmt.cli.entry import exit_at_ctrl_c
from nmt.config.compose import config_dir, flatten, validated, with_values
from nmt.config.errors import UserError, for_shell, format_value, user_path
from nmt.config.schema import TrainConfig
from nmt.config.schema.commands import CHANGEABLE_KEYS, PATH_KEYS
from nmt.system.processes import agreed, rank, started_in_group
from nmt.system.run import FINISHED, PRUNED, RunDirectory, load_config, load_values

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What a run starts with."""

    config: TrainConfig
    directory: Path
    overrides: list[str]  # what the user set, as typed, but for Hydra's own keys
    choices: dict[str, str]  # the choice of each group; {} for a resumed run, which has recorded them


def main() -> None:
    run_command("train", _train)


def _train(arguments: list[str]) -> int:
    options = parse_arguments("train", arguments)
    if options.shell_completion:
        _call_hydra(arguments)
        return 0
    words = with_texts_quoted(options.overrides, TrainConfig)
    single = _single(words)
    if resumes(words) and not options.multirun:
        return _resume(options, words)
    config = composed("train", single)
    if options.multirun or config.hydra.mode == RunMode.MULTIRUN:
        return _sweep(options, config, words)
    _refuse_sweep(config, words)
    start = _new_run(config, words)
    if options.dry_run:
        return _dry_run(start, words)
    return _run(start)


def _single(words: Sequence[str]) -> list[str]:
    """Return the overrides with a single value. Raises UserError for those that make no sense."""
    return [each.input_line or "" for each in check(words, "train") if not each.is_sweep_override()]


def new_run(overrides: Sequence[str]) -> Start:
    """Compose a new run from overrides. Raises UserError for a mistake, or if they would resume a run or sweep."""
    words = with_texts_quoted(overrides, TrainConfig)
    config = composed(
        "train", [each.input_line or "" for each in check(words, "train") if not each.is_sweep_override()]
    )
    _refuse_sweep(config, words)
    return _new_run(config, words)


def _new_run(config: DictConfig, words: Sequence[str]) -> Start:
    directory = user_path(agreed("run directory", str(config.hydra.run.dir)))
    values, choices = typed("train", TrainConfig, config, config.hydra, words)
    if values.run is not None:
        raise UserError(f"run={values.run}: resumes a run, but this starts a new one; leave it out")
    return Start(values.with_absolute_paths(), directory, of_job(words), choices)


def _refuse_sweep(config: DictConfig, words: Sequence[str]) -> None:
    """Raise UserError for overrides that a single run would ignore."""
    for override in check(words, "train"):
        if override.is_sweep_override():
            raise UserError(several_values(override, "train"))
        if str(override.key_or_group).startswith(SWEEP_KEYS):
            raise UserError(f"{override.input_line}: is for a sweep; add -m")
    params = config.hydra.sweeper.get("params")
    if params and "hydra.mode=RUN" not in words:
        raise UserError(
            f"experiment: this recipe varies {', '.join(params)}; add -m, or hydra.mode=RUN for a single run"
        )


def _run(start: Start) -> int:
    """Train one run in start.config.processes processes, unless it is complete. Returns the exit status."""
    if started_in_group() and any(word.startswith("processes=") for word in start.overrides):
        raise UserError("processes=: several processes were started already; leave it out")
    status = 0
    if is_complete(start, {FINISHED}):
        log.info("already finished: skipped")
    else:
        status = _work(start, None)
    if rank() == 0:
        _print_next_steps(os.path.relpath(start.directory))
    return status


def _work(start: Start, observer: Any) -> int:  # noqa: ANN401
    with exit_at_ctrl_c("train"):
        from nmt.training.job import train
    return _in_processes(train, start, observer)


def _in_processes(job: Callable[..., int], start: Start, observer: Any) -> int:  # noqa: ANN401
    """Run the job in config.processes processes. Returns the exit status."""
    if start.config.processes == 1 or started_in_group():
        return job(*start, observer)
    from nmt.cli.launch import in_processes

    return in_processes(start.config.processes, "train", job, *start, observer)


def is_complete(start: Start, ended: Collection[str]) -> bool:
    """Return whether the run has ended with this configuration and corpus; `ended` lists statuses of ended runs."""
    from nmt.data.prepare import fingerprint_of

    run, config = RunDirectory(start.directory), start.config
    run.check_contained()
    if run.status() not in ended:
        return False  # before `fingerprint_of`, which reads the corpus and may take long
    return run.has_finished(config.model_dump(mode="json"), fingerprint_of(config.data, config.tokenizer))


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


# Resuming a run


def _resume(options: Namespace, words: list[str]) -> int:
    if options.dry_run:
        run = next(word for word in words if word.startswith("run="))
        raise UserError(f"--dry-run: tries a new run, but {run} resumes one; leave one of them out")
    return _run(resumed(words))


def resumes(overrides: Sequence[str]) -> bool:
    """Do overrides name a run to resume?"""
    return any(word.lstrip("+").startswith("run=") and value_of(word) != "null" for word in overrides)


def resumed(words: Sequence[str]) -> Start:
    """Return the run that run= names, with its saved configuration, to which the other overrides are applied.

    Raises UserError for an override of a key that may not change.
    """
    words = with_texts_quoted(words, TrainConfig)
    overrides = {str(each.key_or_group): each for each in check(words, "train")}
    if several := [each for each in overrides.values() if each.is_sweep_override()]:
        raise UserError(several_values(several[0], "train"))
    if hydra_key := next((key for key in overrides if key.startswith("hydra.run")), None):
        raise UserError(f"{overrides[hydra_key].input_line}: run= resumes in the run's own directory; leave it out")
    run = _existing(overrides["run"].value())
    load_config(run.config)  # a mistake in the file is reported with its path
    # The saved configuration has the keys of PATH_KEYS; the configuration composed here may lack them.
    paths = {key for key in overrides if key in PATH_KEYS}
    config, _ = compose("train", TrainConfig, [word for word in words if word.partition("=")[0] not in paths])
    values = dict(flatten(config.model_dump(mode="json")))
    changes = {}
    for key, override in overrides.items():
        value = _resolved(str(override.input_line), override.value())
        if key not in CHANGEABLE_KEYS:
            raise UserError(
                f"{override.input_line}: run={run.path} resumes with its saved configuration; only these keys may "
                f"change: {', '.join(sorted(CHANGEABLE_KEYS - {'run'}))}"
            )
        changes[key] = value if key in paths else values[key]
    if "NMT_CACHE" in os.environ and "data.cache_dir" not in run.overrides():
        changes.setdefault("data.cache_dir", values["data.cache_dir"])
    config = validated(TrainConfig, with_values(load_values(run.config), changes))
    return Start(config.with_absolute_paths(), run.path, of_job(words), {})


def _existing(run: object) -> RunDirectory:
    """Open the run to resume. Raises UserError if there is none."""
    name = f"run={format_value(run)}"
    if not isinstance(run, str):
        raise UserError(f"{name}: run= resumes one run")
    path = user_path(run)
    if os.path.isfile(path):  # unlike the methods of Path, these functions raise nothing
        raise UserError(
            f"{name}: is a file; an archive cannot be resumed, but training.start_from=FILE starts a new run from its "
            "weights"
        )
    if not os.path.isdir(path):
        raise UserError(f"{name}: no such directory; run= resumes a run, hydra.run.dir= names a new one")
    return RunDirectory.existing(run)


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


# Sweeps


def _sweep(options: Namespace, config: DictConfig, words: list[str]) -> int:
    """Let Hydra run the jobs of a sweep, and report them. Returns the exit status."""
    if options.dry_run:
        raise UserError("--dry-run: tries a single run, but this is a sweep; give each key one value, without -m")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("a sweep cannot run under torchrun; give its jobs several processes with processes=N")
    arguments = ["-m", *sweep.prepare(config, words)]
    failure = None
    try:
        with explained("train", words):
            _call_hydra(arguments)
    except UserError as error:  # of a launcher
        failure = error
    status = sweep.finish()
    if failure is not None:
        raise failure
    return status


def _call_hydra(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    os.environ[DEBUG] = "1"  # otherwise Hydra prints exceptions itself
    hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(job)()


def job(config: DictConfig) -> Any:  # noqa: ANN401
    """Run one job of a sweep; Hydra calls this, with a launcher in another process."""

    def work(directory: Path) -> int:
        words = sweep.job_words()
        values, choices = typed("train", TrainConfig, config, HydraConfig.get(), words, started=True)
        values = values.with_absolute_paths()
        values = values.model_copy(update={"threads": values.threads or sweep.job_threads()})
        start = Start(values, directory, words, choices)
        RunDirectory(directory).wait_until_free(sweep.MAX_WAIT)
        # A run that a sweep pruned is complete for the sweep, but can be resumed as a single run.
        if is_complete(start, {FINISHED, PRUNED}):
            log.info("already finished: skipped")
            return 0
        return _work(start, sweep.observer())

    return sweep.run_job(work)


# The dry run


def _dry_run(start: Start, words: list[str]) -> int:
    """Try a run in a temporary directory, which is removed unless SIGKILL ends the process."""
    if started_in_group():
        raise UserError("--dry-run: several processes were started already; start one, with processes=N")
    with exit_at_ctrl_c("train"):  # Ctrl-C during imports ends the process at once: the directory does not exist yet
        from nmt.training.dry_run import dry_run
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)
    if any(word.startswith("hydra.run.dir=") for word in words):
        RunDirectory(start.directory.absolute()).check(start.config.model_dump(mode="json"))
    with tempfile.TemporaryDirectory(prefix="nmt-dry-run-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # for the files of torch and of child processes
        return _in_processes(dry_run, start._replace(directory=Path(folder, "run")), None)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(STOPPED + number)
