"""What a command would run with, for scripts that start many runs: a mistake in the last is told before the first."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

import nmt.cli.app  # noqa: F401 - the functions that its YAML may call
from nmt.cli import size, words
from nmt.cli.explain import explain
from nmt.config.compose import config_dir, drop_unused_values, typed
from nmt.config.errors import UserError

T = TypeVar("T", bound=BaseModel)


def preview(command: str, schema: type[T], overrides: Sequence[str]) -> T:
    """The command's configuration; where its size is left to the corpus, with the small one.

    Raises UserError with what the command would say.
    """
    for override in words.check(overrides, command):
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: several values are for a sweep, which this is not")
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            config = compose(command, list(overrides))
            if "thresholds" in config.get("size", {}):
                config = compose(command, [*size.without(overrides), "size=small"])
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(explain(error, command)) from None
    return typed(schema, drop_unused_values(schema, cast(dict[str, Any], values), overrides))
