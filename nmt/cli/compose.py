"""From a command line to a typed configuration: Hydra composes the YAML files, the schema checks the values."""

import logging
import os
import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import hydra
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel

from nmt.cli.explain import choices_of, explain
from nmt.config.compose import config_dir, drop_unused_values, validated, validated_union
from nmt.config.errors import UserError, format_value, nearest, plain_value, quoted, user_path
from nmt.config.schema.base import text_keys
from nmt.config.schema.data import Data
from nmt.config.schema.model import SizeThresholds

TEXT_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")
SEARCH_PATH = "hydra.searchpath"
# What a single run and a sweep of nmt-train take of Hydra's own keys, by their start.
RUN_KEYS = ("hydra.run.dir", "hydra.job.name", "hydra.mode", SEARCH_PATH)
SWEEP_KEYS = ("hydra.sweep.", "hydra.launcher", "hydra.sweeper", "hydra/launcher", "hydra/sweeper", "hydra.job.env")
T = TypeVar("T", bound=BaseModel)
log = logging.getLogger(__name__)


def parse_arguments(command: str, arguments: Sequence[str]) -> Namespace:
    """Parse a command line into its options and its `overrides`. Raises UserError for an unknown option."""
    parser = ArgumentParser(f"nmt-{command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", choices=["job"])  # print the composed configuration
    parser.add_argument("--resolve", action="store_true")  # with references replaced by their values
    parser.add_argument("--config-dir", metavar="FOLDER")  # where the user's own recipes are
    if command == "train":
        parser.add_argument("--dry-run", action="store_true")
        parser.add_argument("-m", "--multirun", action="store_true")
        parser.add_argument("-sc", "--shell-completion", action="store_true")  # done by Hydra itself
    options = [option for action in parser._actions for option in action.option_strings]

    def error(message: str) -> NoReturn:
        hint = nearest(message.rpartition(" ")[2].partition("=")[0], options)
        raise UserError(f"{format_value(message, 200)}{hint}; nmt-{command} takes {', '.join(options)}")

    parser.error = error  # type: ignore[method-assign]
    parsed = parser.parse_intermixed_args(list(arguments))
    if parsed.config_dir is not None:
        parsed.overrides.append(f"{SEARCH_PATH}=[{quoted(os.path.abspath(user_path(parsed.config_dir)))}]")
    return parsed


def configured(command: str, schema: type[T], arguments: Sequence[str]) -> T:
    """Compose and check the configuration of a command from its command line. Raises UserError."""
    return compose(command, schema, parse_arguments(command, arguments).overrides)[0]


def compose(command: str, schema: type[T], overrides: Sequence[str]) -> tuple[T, dict[str, str]]:
    """Compose and check the configuration of a command from overrides, without changing Hydra's global state.

    Returns the configuration and the choice of each group. Raises UserError with the message of the command.
    """
    words = with_texts_quoted(overrides, schema)
    if several := [each for each in check(words, command) if each.is_sweep_override()]:
        raise UserError(several_values(several[0], command))
    config = composed(command, words)
    return typed(command, schema, config, config.hydra, words)


def composed(command: str, words: Sequence[str], started: bool = False) -> DictConfig:
    """Compose the YAML files of a command, with Hydra's own section `hydra`.

    started: True within a job of a sweep, for which Hydra has been started. Raises UserError.
    """
    with explained(command, words), nullcontext() if started else hydra_of(command):
        return hydra.compose(command, [*words], return_hydra_config=True)


def hydra_of(command: str) -> Any:  # noqa: ANN401
    """Return a context in which Hydra knows the files in configs/."""
    return initialize_config_dir(str(config_dir()), job_name=command, version_base="1.3")


@contextmanager
def explained(command: str, words: Sequence[str]) -> Iterator[None]:
    """Turn errors of Hydra within this context, which come from the user's words, into a UserError in one line."""
    try:
        with warnings.catch_warnings():  # Hydra only warns of mistakes such as a missing search path
            warnings.filterwarnings("error", category=UserWarning, module=r"hydra\.")
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(explain(error, command, words)) from error


def typed(
    command: str,
    schema: type[T],
    config: DictConfig,
    hydra_config: Any,  # noqa: ANN401
    words: Sequence[str],
    started: bool = False,
) -> tuple[T, dict[str, str]]:
    """Check what Hydra has composed from these words. size=auto becomes the size for the corpus.

    Returns the configuration and the choice of each group. Raises UserError.
    """
    _refuse_shadowed(hydra_config)
    if "thresholds" in config.get("size", {}):
        with explained(command, words):
            size = _size_for_corpus(config)
        config = composed(command, [*without_size(words), f"size={size}"], started)
        hydra_config = config.hydra
        with open_dict(config):
            config.size.pop("thresholds", None)  # a recipe may have set them
    with explained(command, words):
        job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        values = cast(dict[str, Any], OmegaConf.to_container(job, resolve=True, throw_on_missing=True))
    return validated(schema, drop_unused_values(schema, values, words)), choices(hydra_config)


def choices(hydra_config: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the selected choice of each group."""
    selected = hydra_config.runtime.choices
    return {str(group): str(choice) for group, choice in selected.items() if not str(group).startswith("hydra/")}


def without_size(words: Sequence[str]) -> list[str]:
    """Return the overrides without size= and size.thresholds."""
    return [word for word in words if not word.lstrip("+~").startswith(("size=", "size.thresholds"))]


def of_job(words: Sequence[str]) -> list[str]:
    """Return the overrides without those of Hydra's own keys."""
    return [word for word in words if not word.lstrip("+~").startswith("hydra")]


def _refuse_shadowed(hydra_config: Any) -> None:  # noqa: ANN401
    """Raise UserError for a choice that also exists in the user's own folder: Hydra would take that of nmt."""
    folders = [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"]
    for name in (f"{group}/{choice}.yaml" for group, choice in choices(hydra_config).items()):
        for file in (folder / name for folder in folders if folder != config_dir()):
            if file.is_file() and (config_dir() / name).is_file():
                raise UserError(f"{file}: has the name of a choice of nmt, which would be used; rename it")


def _size_for_corpus(config: DictConfig) -> str:
    """Return the size for the number of training pairs (configs/size/auto.yaml).

    Raises UserError if the corpus cannot be read or no size fits it.
    """
    from nmt.data.corpus import count_pairs, splits

    values = OmegaConf.to_container(config.data, resolve=True, throw_on_missing=True)
    data = validated_union(Data, cast(dict[str, Any], values), "data")
    values = cast(dict[str, Any], OmegaConf.to_container(config.size))["thresholds"]
    thresholds = validated_union(SizeThresholds, cast(dict[str, Any], values), "size.thresholds")
    pairs = count_pairs(splits(data)["train"])
    reached = {least: size for size, least in thresholds if pairs >= least}
    if not reached:
        raise UserError(f"size.thresholds: no size begins at or below {pairs:,} training pairs; set one to 0")
    size = str(reached[max(reached)])
    log.info("size: %s, for %s training pairs", size, f"{pairs:,}")
    return size


def check(words: Sequence[str], command: str) -> list[Override]:
    """Parse overrides. Raises UserError for those that cannot be parsed or would have no effect."""
    parsed = [_parsed(word) for word in words]
    for override in parsed:
        key, line = str(override.key_or_group), format_value(override.input_line)
        if command != "train" and key.startswith("hydra") and key != SEARCH_PATH:
            raise UserError(f"{line}: is for nmt-train only")
        if (config_dir() / key).is_dir() and not _names_choices(override):
            raise UserError(f"{line}: choose one of {', '.join(choices_of(key, command))}")
        if key.startswith("hydra") and not key.startswith((*RUN_KEYS, *SWEEP_KEYS)):
            raise UserError(f"{line}: nmt writes its own files and log in the run's directory; leave it out")
    return parsed


def _names_choices(override: Override) -> bool:
    if override.is_delete() or override.is_sweep_override():
        return True
    value = override.value()
    return all(isinstance(name, str) for name in (value if isinstance(value, list) else [value]))


def _parsed(word: str) -> Override:
    if "=" not in word and not word.startswith("~"):
        hint = ""
        if os.path.exists(word):
            hint = f"; write run={word}" if os.path.isdir(word) else f"; to read this file, write < {word}"
        raise UserError(f"{format_value(word)}: expected KEY=VALUE or GROUP=CHOICE{hint}")
    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, RecursionError) as error:
        reason = format_value(str(error).partition("\n")[0])
        raise UserError(
            f"{format_value(word)}: cannot be parsed ({reason}); write no spaces around =, and quote values with "
            "characters other than ASCII letters, digits and . / - _ +, as in \"key='a=b'\""
        ) from None


def several_values(override: Override, command: str) -> str:
    """Say what to write for a list or a sweep in place of several values."""
    key, _, values = str(override.input_line).partition("=")
    if "interval(" in values:
        return f"{override.input_line}: interval(a,b) is for a search: add -m hydra/sweeper=optuna"
    sweep = "; for a sweep add -m" if command == "train" else ""
    return f"{override.input_line}: for a list give '{key}=[{values}]'{sweep}"


def with_texts_quoted(overrides: Sequence[str], schema: type[BaseModel]) -> list[str]:
    """Expand ~ in overrides, and quote texts that Hydra would read as a number or truth value, such as 2024_01 or nan.

    Texts are paths, names and choices. A shell expands ~ only at the start of a word, not after `=`. A prefix ++ has no
    effect, since all keys exist, and is removed.
    """
    keys = {*text_keys(schema), *TEXT_KEYS}
    return [_with_text_quoted(override.removeprefix("++"), keys) for override in overrides]


def _with_text_quoted(override: str, keys: set[str]) -> str:
    key, _, text = override.partition("=")
    if re.fullmatch(r"~[a-zA-Z0-9_./-]*", text):
        return f"{key}={quoted(user_path(text))}"
    name = key.lstrip("+")
    takes_text = name in keys or (config_dir() / name).is_dir()
    return f"{key}={quoted(text)}" if takes_text and isinstance(plain_value(text), bool | int | float) else override


def value_of(override: str) -> str:
    """Return the value of an override as text, without the quotes that Hydra would remove."""
    text = override.partition("=")[2]
    with suppress(HydraException, ValueError):
        value = OverridesParser.create().parse_override(override).value()
        return value if isinstance(value, str) else text
    return text
