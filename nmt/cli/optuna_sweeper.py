"""A sweeper that searches: Optuna (Akiba et al. 2019) proposes each trial from earlier results, and prunes trials.

Hydra's own Optuna plugin is limited to Optuna 2, cannot resume a search and cannot prune. Where a search was killed
while it wrote the journal, the next one waits half a minute for Optuna's lock.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from nmt.cli.compose import as_words, last_overrides
from nmt.cli.hydra_errors import explain
from nmt.compare.jobs import record_failure
from nmt.config.checks import validated
from nmt.config.errors import UserError
from nmt.config.schema.training import OptunaSettings
from nmt.evaluate.metrics import sign_of
from nmt.system.files import try_lock
from nmt.system.run import PRUNED, RunDirectory

JOURNAL = "optuna.journal"  # file in the sweep's directory in which Optuna stores the trials
STUDY = "sweep"
STEPS_PER_EPOCH = 1000  # Optuna counts steps in whole numbers: they are thousandths of an epoch
log = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.ERROR)


class OptunaSweeper(Sweeper):
    """Runs `n_trials` trials to optimise the validation score `validation.monitor`; resumes an interrupted search."""

    def __init__(self, params: Mapping[str, str] | None, **values: object) -> None:
        """Check the settings. params: overrides by key. values: the fields of `OptunaSettings`. Raises UserError."""
        self.settings = validated(OptunaSettings, values, "hydra.sweeper")
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what a sweep needs; Hydra calls this before `sweep`."""
        self._config, self._loader = config, hydra_context.config_loader
        self._directory = Path(config.hydra.sweep.dir)
        self._launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the search; Hydra calls this with the overrides from the command line."""
        overrides = last_overrides(
            self._loader, [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        )
        self._fixed = as_words(override for override in overrides.values() if not override.is_sweep_override())
        space = {key: _distribution(override) for key, override in overrides.items() if override.is_sweep_override()}
        with _locked_journal(self._directory):
            self._search(space)

    def _search(self, space: dict[str, Any]) -> None:
        """Finish the trials that an interrupted search has left, then run those that are missing.

        space: key -> Optuna's distribution.
        """
        monitor, startup = self._config.validation.monitor, self.settings.startup_trials
        study = optuna.create_study(
            study_name=STUDY,
            storage=_storage(self._directory),
            direction="maximize" if sign_of(monitor) > 0 else "minimize",
            load_if_exists=True,
        )
        jobs = self._config.hydra.launcher.get("n_jobs") or 1
        parallel = self.settings.n_jobs or (jobs if jobs > 0 else os.cpu_count() or 1)
        left = study.get_trials(states=[TrialState.RUNNING])
        for trial in [trial for trial in left if trial.params.keys() != space.keys()]:
            study.tell(trial.number, state=TrialState.FAIL)  # the search was killed while Optuna wrote the trial
            left.remove(trial)
        for start in range(0, len(left), parallel):
            self._launch(study, left[start : start + parallel])
        while missing := max(0, self.settings.n_trials - len(study.trials)):
            # The seed depends on the number of trials. Therefore an interrupted search, when resumed, makes the same
            # proposals as an uninterrupted one, if its jobs run one at a time.
            seed = self._config.seed + len(study.trials)
            if self.settings.sampler == "tpe":
                study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup)
            else:
                study.sampler = optuna.samplers.RandomSampler(seed=seed)
            self._launch(study, [study.ask(space) for _ in range(min(missing, parallel))])
        if study.get_trials(states=[TrialState.COMPLETE]):
            best = study.best_trial
            values = " ".join(f"{key}={value}" for key, value in best.params.items())
            log.info("\nbest trial: %d, validation %s %.4f, with %s", best.number, monitor, best.value, values)

    def _launch(self, study: Any, trials: Sequence[Any]) -> None:  # noqa: ANN401
        """Run trials, each in a directory named by the trial's number, and report their scores to Optuna."""
        jobs = {}
        for trial in trials:
            overrides = [*self._fixed, *(f"{key}={value}" for key, value in trial.params.items())]
            try:
                self._loader.load_sweep_config(self._config, overrides)
            except HydraException as error:  # e.g. a key of a choice that this trial does not select
                record_failure(self._directory / str(trial.number), explain(error, "train", overrides), overrides)
                study.tell(trial.number, state=TrialState.FAIL)
            else:
                jobs[trial.number] = overrides
        for numbers in _consecutive(jobs):
            results = self._launcher.launch([jobs[number] for number in numbers], numbers[0])
            for number, result in zip(numbers, results, strict=True):
                assert result.hydra_cfg is not None
                run = RunDirectory(result.hydra_cfg.hydra.runtime.output_dir)
                score = result.return_value  # score, None or name of a signal, from nmt.cli.sweep.job
                if isinstance(score, str):
                    log.warning("trial %d was stopped by %s; start the search again to resume it", number, score)
                elif score is None:
                    study.tell(number, state=TrialState.FAIL)
                elif run.status() == PRUNED:
                    study.tell(number, state=TrialState.PRUNED)
                else:
                    study.tell(number, score)


def _consecutive(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Divide trial numbers into groups of consecutive numbers, because a launcher numbers its jobs consecutively."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        yield [number for _, number in group]


def _register() -> None:
    """Register this module in the namespace hydra_plugins: Hydra accepts sweepers only from modules there."""
    plugins = Plugins.instance()  # imports the namespace, if other plugins are installed
    namespace = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    namespace.__dict__["nmt"] = sys.modules["hydra_plugins.nmt"] = sys.modules[__name__]
    OptunaSweeper.__module__ = "hydra_plugins.nmt"
    plugins.register(OptunaSweeper)


_register()


@dataclass
class TrialObserver:
    """Reports the validations of a job to Optuna, from any process: the first call opens the study."""

    directory: Path  # directory of the search
    job: int
    pruner: str
    startup_trials: int

    def __call__(self, epochs: float, score: float) -> bool:
        """Report the validation score after this number of epochs. Returns True if Optuna wants to prune the trial."""
        trial, reported = self._trial
        step = round(STEPS_PER_EPOCH * epochs)
        if step not in reported:  # a resumed trial has reported earlier steps already
            trial.report(score, step)
        return bool(trial.should_prune())

    @cached_property
    def _trial(self) -> Any:  # noqa: ANN401
        pruners: dict[str, optuna.pruners.BasePruner] = {
            "median": optuna.pruners.MedianPruner(n_startup_trials=self.startup_trials),
            "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=STEPS_PER_EPOCH),
            "none": optuna.pruners.NopPruner(),
        }
        study = optuna.load_study(study_name=STUDY, storage=_storage(self.directory), pruner=pruners[self.pruner])
        frozen = study.trials[self.job]
        return optuna.trial.Trial(study, frozen._trial_id), set(frozen.intermediate_values)


@contextmanager
def _locked_journal(directory: Path) -> Iterator[None]:
    """Lock the journal of a search, and remove an incomplete last line, left by a killed search. Raises UserError
    if another process searches there."""
    with (directory / JOURNAL).open("a+b") as journal:
        if not try_lock(journal.fileno(), directory / JOURNAL):
            raise UserError(f"{directory}: another process is searching there; wait for it or stop it")
        journal.seek(0)
        journal.truncate(journal.read().rfind(b"\n") + 1)
        yield


def _storage(directory: Path) -> Any:  # noqa: ANN401
    path = str((directory / JOURNAL).absolute())
    # By default the lock is a link, which would be held forever if a killed search's directory is moved.
    return JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))


def _distribution(override: Override) -> Any:  # noqa: ANN401
    """Return Optuna's distribution for interval(a,b), tag(log,interval(a,b)), range(a,b,step) or several values."""
    value: Any = override.value()
    tags = set(getattr(value, "tags", ()))
    if tags - ({"log"} if isinstance(value, IntervalSweep) else set()):
        raise UserError(f"{override.input_line}: the only tag is log, for an interval: tag(log,interval(a,b))")
    if isinstance(value, IntervalSweep):
        return FloatDistribution(value.start, value.end, log="log" in tags)  # type: ignore[arg-type]
    choices = list(override.sweep_string_iterator())
    if isinstance(value, RangeSweep) and not value.shuffle and all(choice.lstrip("-").isdigit() for choice in choices):
        numbers = sorted(map(int, choices))
        return IntDistribution(numbers[0], numbers[-1], step=abs(int(value.step)))
    return CategoricalDistribution(choices)
