"""From a command line to a typed configuration: Hydra composes the YAML files, the schema checks the values."""

import logging
import os
import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from nmt.config.schema.data import Data
from nmt.config.schema.model import SizeThresholds

SEARCH_PATH = "hydra.searchpath"
# The keys of Hydra that nmt-train takes for a single run and for a sweep, by their start.
RUN_KEYS = (SEARCH_PATH, "hydra.run.dir", "hydra.job.name", "hydra.mode")
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


def compose(command: str, schema: type[T], words: Sequence[str]) -> tuple[T, dict[str, str]]:
    """Compose and check the configuration of a command from overrides, without changing Hydra's global state.

    Returns the configuration and the choice of each group. Raises UserError with the message of the command.
    """
    overrides = parsed(words, command)
    refuse_several_values(overrides, command)
    return typed(command, schema, composed(command, lines(overrides)), lines(overrides))


def parsed(words: Sequence[str], command: str) -> list[Override]:
    """Parse overrides. Raises UserError for those that cannot be parsed or would have no effect."""
    overrides = [_parsed(_as_meant(word)) for word in words]
    taken = (*RUN_KEYS, *SWEEP_KEYS) if command == "train" else (SEARCH_PATH,)
    for override in overrides:
        key, word = str(override.key_or_group), format_value(override.input_line)
        if key.startswith("hydra") and not key.startswith(taken):
            raise UserError(
                f"{word}: of Hydra's keys, nmt-{command} takes only {', '.join(taken)}{nearest(key, taken)}"
            )
        is_choice = override.is_delete() or override.is_sweep_override() or isinstance(override.value(), str | list)
        if (config_dir() / key).is_dir() and not is_choice:
            raise UserError(f"{word}: choose one of {', '.join(choices_of(key, command))}")
    return overrides


def _as_meant(word: str) -> str:
    """Rewrite what Hydra would not read as it was meant: a home directory ~, and a text such as 2024_01_15.

    A shell expands ~ only at the start of a word. Removes a prefix ++, which has no effect, since all keys exist.
    """
    key, _, text = word.removeprefix("++").partition("=")
    if re.fullmatch(r"~[a-zA-Z0-9_./-]*", text):
        return f"{key}={quoted(user_path(text))}"
    is_number = "_" in text and isinstance(plain_value(text), int | float)
    return f"{key}={quoted(text)}" if is_number else word.removeprefix("++")


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


def lines(overrides: Iterable[Override]) -> list[str]:
    """Return overrides as they are typed."""
    return [override.input_line or "" for override in overrides]


def refuse_several_values(overrides: Iterable[Override], command: str) -> None:
    """Raise UserError for an override that has several values or an interval, and say what to write instead."""
    for override in overrides:
        if override.is_sweep_override():
            key, _, values = str(override.input_line).partition("=")
            sweep = "; for a sweep add -m" if command == "train" else ""
            if "interval(" in values:
                raise UserError(f"{override.input_line}: interval(a,b) is for a search: add -m hydra/sweeper=optuna")
            raise UserError(f"{override.input_line}: for a list give '{key}=[{values}]'{sweep}")


def of_job(words: Iterable[str]) -> list[str]:
    """Return the overrides without those of Hydra's own keys."""
    return [word for word in words if not word.lstrip("+~").startswith("hydra")]


def composed(command: str, words: Sequence[str]) -> DictConfig:
    """Compose the YAML files of a command, with Hydra's own section `hydra`. Raises UserError."""
    with explained(command, words), hydra_of(command):
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


def typed(command: str, schema: type[T], config: DictConfig, words: Sequence[str]) -> tuple[T, dict[str, str]]:
    """Check what Hydra has composed from these words. size=auto becomes the size for the corpus.

    Returns the configuration and the choice of each group. Raises UserError.
    """
    if "thresholds" in config.get("size", {}):
        with explained(command, words):
            size = _size_for_corpus(config)
        config = composed(command, [*without_size(words), f"size={size}"])
        with open_dict(config):
            config.size.pop("thresholds", None)  # a recipe may have set them
    with explained(command, words):
        job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        values = cast(dict[str, Any], OmegaConf.to_container(job, resolve=True, throw_on_missing=True))
    selected = {str(group): str(choice) for group, choice in config.hydra.runtime.choices.items()}
    choices = {group: choice for group, choice in selected.items() if not group.startswith("hydra/")}
    for source in config.hydra.runtime.config_sources:  # of equal names in two folders, Hydra takes the first
        for file in (Path(source.path, group, f"{choice}.yaml") for group, choice in choices.items()):
            ours = config_dir() / file.relative_to(source.path)
            if source.schema == "file" and file != ours and file.is_file() and ours.is_file():
                raise UserError(f"{file}: has the name of a choice of nmt, which would be used; rename it")
    return validated(schema, drop_unused_values(schema, values, words)), choices


def without_size(words: Iterable[str]) -> list[str]:
    """Return the overrides without size= and size.thresholds."""
    return [word for word in words if not word.lstrip("+~").startswith(("size=", "size.thresholds"))]


def _size_for_corpus(config: DictConfig) -> str:
    """Return the size for the number of training pairs (configs/size/auto.yaml).

    Raises UserError if the corpus cannot be read or no size fits it.
    """
    from nmt.data.corpus import count_pairs, splits

    data, size = (
        cast(dict[str, Any], OmegaConf.to_container(section, resolve=True, throw_on_missing=True))
        for section in (config.data, config.size)
    )
    pairs = count_pairs(splits(validated_union(Data, data, "data"))["train"])
    thresholds = validated_union(SizeThresholds, size["thresholds"], "size.thresholds")
    reached = {least: name for name, least in thresholds if pairs >= least}
    if not reached:
        raise UserError(f"size.thresholds: no size begins at or below {pairs:,} training pairs; set one to 0")
    chosen = str(reached[max(reached)])
    log.info("size: %s, for %s training pairs", chosen, f"{pairs:,}")
    return chosen
