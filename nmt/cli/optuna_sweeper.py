"""A search in place of a grid: Optuna (Akiba et al. 2019) proposes each trial from the ones before, and prunes.

The sweeper that Hydra offers for it has Optuna 2, starts anew where it was killed, and cannot prune.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from nmt.cli.explain import explain, record_failure
from nmt.config.errors import UserError, nearest
from nmt.run import PRUNED, RunDirectory

JOURNAL = "optuna.journal"  # all that Optuna knows, in the sweep's directory
STUDY = "sweep"
THOUSANDTHS = 1000  # of an epoch: Optuna counts in whole numbers
log = logging.getLogger(__name__)


class OptunaSweeper(Sweeper):
    """Runs `n_trials` trials to the best validation score (`validation.monitor`); started again, it goes on."""

    def __init__(
        self,
        n_trials: int,
        n_jobs: int | None,
        sampler: str,
        pruner: str,
        startup_trials: int,
        params: Mapping[str, str] | None,
    ) -> None:
        for name, given, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
            if given not in known:
                raise UserError(f"hydra.sweeper.{name}={given}: not one of {', '.join(known)}{nearest(given, known)}")
        for name, count, least in (
            ("n_trials", n_trials, 1),
            ("n_jobs", n_jobs, 1),
            ("startup_trials", startup_trials, 0),
        ):
            if not (count is None and name == "n_jobs") and (type(count) is not int or count < least):
                raise UserError(f"hydra.sweeper.{name}={count}: must be a whole number, {least} or more")
        self.n_trials, self.n_jobs, self.startup_trials = n_trials, n_jobs, startup_trials
        self.sampler, self.params = sampler, params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra."""
        self._config, self._loader = config, hydra_context.config_loader
        self._launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        """Called by Hydra with the command line's overrides."""
        optuna = _optuna()
        given = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        parsed = OverridesParser.create(self._loader).parse_overrides(given)
        keys = {override.get_key_element(): override for override in parsed}  # the last of each
        self._fixed = [override.input_line or "" for override in keys.values() if not override.is_sweep_override()]
        space = {key: _distribution(override) for key, override in keys.items() if override.is_sweep_override()}
        if not space:
            raise UserError("hydra/sweeper=optuna: nothing to search; give a key several values or an interval(a,b)")
        directory = Path(self._config.hydra.sweep.dir)
        directory.mkdir(parents=True, exist_ok=True)
        monitor = self._config.validation.monitor
        study = optuna.create_study(
            study_name=STUDY,
            storage=_storage(directory),
            direction="minimize" if monitor == "loss" else "maximize",
            load_if_exists=True,
        )
        shown = {key: str(distribution) for key, distribution in space.items()}
        self._check(study, {"monitor": monitor, "fixed": sorted(self._fixed), "space": shown})
        running = study.get_trials(states=[optuna.trial.TrialState.RUNNING])  # of a sweep that was killed
        for trial in running:
            if trial.params.keys() != space.keys():  # while the trial was being written down
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        whole = [trial for trial in running if trial.params.keys() == space.keys()]
        for start in range(0, len(whole), self._jobs()):
            self._launch(study, whole[start : start + self._jobs()])
        while missing := max(0, self.n_trials - len(study.trials)):
            # With one trial at a time the same proposals, whether the sweep was interrupted or not.
            study.sampler = SAMPLERS[self.sampler](
                seed=self._config.seed + len(study.trials), startup_trials=self.startup_trials
            )
            self._launch(study, [study.ask(space) for _ in range(min(missing, self._jobs()))])
        if study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
            best = study.best_trial
            values = " ".join(f"{key}={value}" for key, value in best.params.items())
            log.info("\nbest trial: %d, validation %s %.4f, with %s", best.number, monitor, best.value, values)

    def _check(self, study: Any, asked: dict[str, Any]) -> None:  # noqa: ANN401
        """Raises UserError if the study is of another search."""
        before = study.user_attrs.get("asked")
        if before is None:
            study.set_user_attr("asked", asked)
        elif changed := [key for key in asked if before[key] != asked[key]]:
            key = changed[0]
            raise UserError(
                f"{self._config.hydra.sweep.dir}: holds another search ({key}: {before[key]} there, "
                f"{asked[key]} here); choose another hydra.sweep.dir"
            )

    def _jobs(self) -> int:
        """Trials at a time."""
        beside = self._config.hydra.launcher.get("n_jobs") or 1
        return self.n_jobs or (beside if beside > 0 else os.cpu_count() or 1)

    def _launch(self, study: Any, trials: Sequence[Any]) -> None:  # noqa: ANN401
        """Run trials, each in the directory of its number, and tell what came of them."""
        states, sweep = _optuna().trial.TrialState, Path(self._config.hydra.sweep.dir)
        jobs = {}
        for trial in trials:
            overrides = [*self._fixed, *(f"{key}={value}" for key, value in trial.params.items())]
            try:
                self._loader.load_sweep_config(self._config, overrides)
            except HydraException as error:  # such as a value of a choice that was not drawn
                record_failure(sweep / str(trial.number), explain(error, "train"), overrides)
                study.tell(trial.number, state=states.FAIL)
            else:
                jobs[trial.number] = overrides
        for numbers in _consecutive(list(jobs)):
            found = self._launcher.launch([jobs[number] for number in numbers], numbers[0])
            for number, done in zip(numbers, found, strict=True):
                assert done.hydra_cfg is not None
                run = RunDirectory(done.hydra_cfg.hydra.runtime.output_dir)
                score = done.return_value
                if isinstance(score, str):
                    log.warning("trial %d was stopped by %s; start the search again to go on with it", number, score)
                elif score is None:
                    study.tell(number, state=states.FAIL)
                elif run.status() == PRUNED:
                    study.tell(number, state=states.PRUNED)
                else:
                    study.tell(number, score)


def _consecutive(numbers: Sequence[int]) -> list[list[int]]:
    """Groups of numbers that follow each other, as a launcher numbers its jobs."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][-1] == number - 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _register() -> None:
    """Hydra takes sweepers from modules of the namespace hydra_plugins alone: be one of them."""
    try:
        import hydra_plugins
    except ImportError:  # no other plugin is installed
        hydra_plugins = ModuleType("hydra_plugins")
        hydra_plugins.__path__ = []
        sys.modules["hydra_plugins"] = hydra_plugins
    hydra_plugins.nmt = sys.modules["hydra_plugins.nmt"] = sys.modules[__name__]
    OptunaSweeper.__module__ = "hydra_plugins.nmt"
    Plugins.instance().register(OptunaSweeper)


_register()


def observer() -> Callable[[float, float], bool] | None:
    """For the job that runs now: reports its validations to Optuna and asks whether to go on."""
    hydra = HydraConfig.get()
    if not hydra.sweeper._target_.endswith(".OptunaSweeper"):
        return None
    optuna = _optuna()
    pruner = PRUNERS[hydra.sweeper.pruner](hydra.sweeper.startup_trials)
    study = optuna.load_study(study_name=STUDY, storage=_storage(Path(hydra.sweep.dir)), pruner=pruner)
    trial = optuna.trial.Trial(study, study.trials[hydra.job.num]._trial_id)
    known = study.trials[hydra.job.num].intermediate_values  # of a trial that was resumed

    def observe(epochs: float, score: float) -> bool:
        step = round(THOUSANDTHS * epochs)
        if step not in known:
            trial.report(score, step)
        return bool(trial.should_prune())

    return observe


def _optuna() -> Any:  # noqa: ANN401
    try:
        import optuna
    except ImportError:
        raise UserError('hydra/sweeper=optuna needs another package: pip install "nmt[optuna]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _storage(directory: Path) -> Any:  # noqa: ANN401
    storages = _optuna().storages
    return storages.JournalStorage(storages.journal.JournalFileBackend(str((directory / JOURNAL).absolute())))


def _distribution(override: Override) -> Any:  # noqa: ANN401
    """interval(a,b), tag(log,interval(a,b)), range(a,b,step), or one of several."""
    distributions, value = _optuna().distributions, override.value()
    tags = set(getattr(value, "tags", ()))
    if tags - ({"log"} if isinstance(value, IntervalSweep) else set()):
        raise UserError(f"{override.input_line}: of tags there is log, of an interval: tag(log,interval(a,b))")
    if isinstance(value, IntervalSweep):
        try:
            return distributions.FloatDistribution(value.start, value.end, log="log" in tags)
        except ValueError as error:
            raise UserError(f"{override.input_line}: {error}") from None
    choices = list(override.sweep_string_iterator())
    if not choices:
        raise UserError(f"{override.input_line}: there is no value in it")
    if isinstance(value, RangeSweep) and not value.shuffle and all(choice.lstrip("-").isdigit() for choice in choices):
        numbers = sorted(map(int, choices))
        return distributions.IntDistribution(numbers[0], numbers[-1], step=abs(int(value.step)))
    return distributions.CategoricalDistribution(choices)


SAMPLERS: dict[str, Callable[..., Any]] = {
    "tpe": lambda seed, startup_trials: _optuna().samplers.TPESampler(seed=seed, n_startup_trials=startup_trials),
    "random": lambda seed, startup_trials: _optuna().samplers.RandomSampler(seed=seed),
}
PRUNERS: dict[str, Callable[[int], Any]] = {
    "median": lambda startup_trials: _optuna().pruners.MedianPruner(n_startup_trials=startup_trials),
    "halving": lambda startup_trials: _optuna().pruners.SuccessiveHalvingPruner(min_resource=THOUSANDTHS),
    "none": lambda startup_trials: _optuna().pruners.NopPruner(),
}
