"""What a run starts with: its configuration and its directory, for a new run and for one that is resumed."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from nmt.cli.compose import SWEEP_KEYS, composed, explained, lines, of_job, parsed, refuse_several_values, typed
from nmt.config.compose import validated, with_values
from nmt.config.errors import UserError, nearest, user_path
from nmt.config.schema import TrainConfig
from nmt.config.schema.commands import CHANGEABLE_KEYS
from nmt.system.processes import agreed
from nmt.system.run import RunDirectory, load_config, load_values


class Start(NamedTuple):
    """What a run starts with."""

    config: TrainConfig
    directory: Path
    overrides: list[str]  # what the user set, as typed, but for Hydra's own keys
    choices: dict[str, str]  # the choice of each group; {} for a resumed run, which has recorded them

    def is_complete(self, ended: Collection[str]) -> bool:
        """Has the run ended with this configuration and corpus? `ended` lists the statuses of a run that has ended."""
        from nmt.data.prepare import fingerprint_of

        run = RunDirectory(self.directory)
        if run.status() not in ended:
            return False  # before `fingerprint_of`, which reads the corpus and may take long
        fingerprint = fingerprint_of(self.config.data, self.config.tokenizer)
        return run.has_finished(self.config.model_dump(mode="json"), fingerprint)


def new_run(words: Sequence[str], config: DictConfig | None = None) -> Start:
    """Compose a new run from overrides. `config` is what Hydra has composed from them, if that is known.

    Raises UserError for a mistake, and for overrides that need a sweep or resume a run.
    """
    overrides = parsed(words, "train")
    refuse_several_values(overrides, "train")
    for override in overrides:
        if str(override.key_or_group).startswith(SWEEP_KEYS):
            raise UserError(f"{override.input_line}: is for a sweep; add -m")
    words = lines(overrides)
    config = composed("train", words) if config is None else config
    varied = config.hydra.sweeper.get("params") or {}
    if "hydra.mode=RUN" not in words and varied.keys() - {each.get_key_element() for each in overrides}:
        raise UserError(
            f"experiment: this recipe varies {', '.join(varied)}; use it for a sweep of its own, with -m, or for a "
            "single run, with hydra.mode=RUN"
        )
    directory = user_path(agreed("run directory", str(config.hydra.run.dir)))
    values, choices = typed("train", TrainConfig, config, words)
    if values.run is not None:
        raise UserError(f"run={values.run}: resumes a single run, but this starts a new one; leave it out")
    return Start(values.with_absolute_paths(), directory, of_job(words), choices)


def resumes(words: Sequence[str]) -> bool:
    """Do overrides name a run to resume?"""
    return any(each.key_or_group == "run" and each.value() is not None for each in parsed(words, "train"))


def resumed(words: Sequence[str]) -> Start:
    """Return the run that run= names, with its saved configuration, to which the other overrides are applied.

    Raises UserError for an override of a key that may not change.
    """
    overrides = parsed(words, "train")
    refuse_several_values(overrides, "train")
    words = lines(overrides)
    given: dict[str, Any] = {str(override.key_or_group): override.value() for override in overrides}
    path = str(given.pop("run"))
    run = RunDirectory.existing(path)
    if run.is_archive:
        raise UserError(
            f"run={path}: is a file; an archive cannot be resumed, but training.start_from=FILE starts a new run from "
            "its weights"
        )
    changeable = sorted(CHANGEABLE_KEYS - {"run"})
    if key := next((key for key in given if key not in changeable), None):
        raise UserError(
            f"{key}: run={path} resumes with its saved configuration; only these keys may change: "
            f"{', '.join(changeable)}{nearest(key, changeable)}"
        )
    if "NMT_CACHE" in os.environ and "data.cache_dir" not in run.overrides():
        given.setdefault("data.cache_dir", os.environ["NMT_CACHE"])
    with explained("train", words):  # errors of references such as ${oc.env:HOME}
        changes = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(given), resolve=True))
    load_config(run.config)  # a mistake in the file is reported with its path
    config = validated(TrainConfig, with_values(load_values(run.config), changes))
    return Start(config.with_absolute_paths(), run.path, of_job(words), {})
