"""A model's size, where it is left to the corpus: size=auto."""

import logging
from collections.abc import Sequence
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write

from nmt.cli import words
from nmt.config import schema
from nmt.config.compose import typed_union
from nmt.config.errors import UserError

log = logging.getLogger(__name__)


def settle(config: DictConfig, command: str) -> DictConfig:
    """The job's configuration, composed again with the size for its number of training pairs (configs/size/auto.yaml)
    as if that had been asked for; one that has a size as it is. Raises UserError if the corpus cannot be read."""
    if "thresholds" not in config.get("size", {}):
        return config
    from nmt.data.corpus import splits

    values = OmegaConf.to_container(config.data, resolve=True, throw_on_missing=True)
    data = typed_union(schema.Data, cast(dict[str, Any], values), "data")
    thresholds = cast(dict[str, Any], OmegaConf.to_container(config.size))["thresholds"]
    thresholds = typed_union(schema.SizeThresholds, thresholds, "size.thresholds")
    pairs = sum(1 for _ in splits(data)["train"])
    reached = sorted((each for each in thresholds if pairs >= each[1]), key=lambda each: each[1])
    if not reached:
        raise UserError(f"size.thresholds: no size begins at or below {pairs:,} training pairs; set one to 0")
    size = reached[-1][0]
    log.info("size: %s, for %s training pairs", size, f"{pairs:,}")
    job = cast(DictConfig, HydraConfig.get())
    with read_write(job):
        job.runtime.choices["size"] = size  # what is written down of the run
    return hydra.compose(command, [*without(words.given(job)), f"size={size}"])


def without(overrides: Sequence[str]) -> list[str]:
    """Overrides but those that leave the size to the corpus, to be followed by size=..."""
    return [override for override in overrides if not override.lstrip("+~").startswith(("size=", "size.thresholds"))]
