"""Compose a command's configuration from YAML files and overrides, with the model size that suits the corpus."""

import logging
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from nmt.cli import arguments, help
from nmt.config.compose import config_dir, drop_unused_values, validated, validated_union
from nmt.config.errors import UserError, format_value
from nmt.config.overrides import user_path
from nmt.config.schema.data import Data
from nmt.config.schema.model import SizeThresholds
from nmt.system.processes import agreed

T = TypeVar("T", bound=BaseModel)
log = logging.getLogger(__name__)


def job_config(schema: type[T], config: DictConfig, command: str) -> T:
    """The typed configuration of the job that Hydra composed. Raises UserError, or OmegaConfBaseException."""
    return _typed(schema, _with_size(config, command), arguments.job_overrides(HydraConfig.get()))


def preview(command: str, schema: type[T], overrides: Sequence[str]) -> T:
    """The configuration of a command that a script will start. It has size=small in place of size=auto.

    Raises UserError with the command's own message, so that a script can report all mistakes before its first run.
    """
    overrides = arguments.prepared(overrides, schema)
    for override in arguments.check(overrides, command):
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: several values need a sweep, which this is not")
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            config = hydra.compose(command, list(overrides))
            if _has_automatic_size(config):
                config = hydra.compose(command, [*without_size(overrides), "size=small"])
        return _typed(schema, config, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(help.explain(error, command)) from None


def without_size(overrides: Sequence[str]) -> list[str]:
    """The overrides without those of size=auto."""
    return [override for override in overrides if not override.lstrip("+~").startswith(("size=", "size.thresholds"))]


def _typed(schema: type[T], config: DictConfig, overrides: Sequence[str]) -> T:
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    return validated(schema, drop_unused_values(schema, values, overrides))


def _has_automatic_size(config: DictConfig) -> bool:
    return "thresholds" in config.get("size", {})


def _with_size(config: DictConfig, command: str) -> DictConfig:
    """Resolve size=auto: compose again with the size for the number of training pairs (configs/size/auto.yaml).

    Raises UserError if the corpus cannot be read or no size fits it.
    """
    if not _has_automatic_size(config):
        return config
    from nmt.data.reading.corpus import splits
    from nmt.data.reading.sources import count_pairs

    values = OmegaConf.to_container(config.data, resolve=True, throw_on_missing=True)
    data = validated_union(Data, cast(dict[str, Any], values), "data")
    values = cast(dict[str, Any], OmegaConf.to_container(config.size))["thresholds"]
    thresholds = validated_union(SizeThresholds, cast(dict[str, Any], values), "size.thresholds")
    pairs = count_pairs(splits(data)["train"])
    reached = {least: size for size, least in thresholds if pairs >= least}
    if not reached:
        raise UserError(f"size.thresholds: no size begins at or below {pairs:,} training pairs; set one to 0")
    size = reached[max(reached)]
    log.info("size: %s, for %s training pairs", size, f"{pairs:,}")
    job = cast(DictConfig, HydraConfig.get())
    with read_write(job):
        job.runtime.choices["size"] = size  # which the run records
    overrides = without_size(arguments.job_overrides(job))
    searched = [each for each in arguments.job_overrides(job, "hydra") if each.startswith("hydra.searchpath=")]
    return hydra.compose(command, [*searched, *overrides, f"size={size}"])


def _run_dir(run: str | None, new: str) -> str:
    """The directory of the run to resume, else `new`. Raises UserError before Hydra creates anything."""
    if run is None:
        return agreed("run directory", new)
    path = user_path(run)
    if path.is_file():
        raise UserError(
            f"run={format_value(run)}: is a file; an archive cannot be resumed, but training.start_from=FILE "
            "starts a new run from its weights"
        )
    if not path.is_dir():
        raise UserError(
            f"run={format_value(run)}: no such directory; run= resumes a run, hydra.run.dir= names a new one"
        )
    return str(path)


def _for_several(run: str | list[str] | None, folder: str) -> str | None:
    """A folder for the results of several runs together, or of an archive; None for one run."""
    runs = [run] if run is None or isinstance(run, str) else run
    return folder if len(runs) > 1 or any(user_path(str(name)).is_file() for name in runs) else None


# Functions that YAML files call. Registered at import: a launcher's worker process imports modules but runs no `main`.
OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
OmegaConf.register_new_resolver("for_several", _for_several, replace=True)
OmegaConf.register_new_resolver("choices", help.all_choices, replace=True)
OmegaConf.register_new_resolver("values", help.values, replace=True)
