"""From a command line to a typed configuration: Hydra composes the YAML files, the schema checks the values.

`compose` does this for any command; for nmt-train, `new_run` and `resumed_run` also say which run is meant.
"""

import logging
import os
import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import hydra
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from nmt.cli.hydra_errors import explain
from nmt.config.checks import config_dir, drop_unused_values, validated, validated_union
from nmt.config.errors import UserError, format_value, nearest, plain_value, quoted, user_path
from nmt.config.schema import TrainConfig
from nmt.config.schema.commands import CHANGEABLE_KEYS
from nmt.config.schema.data import Data
from nmt.config.schema.model import SizeThresholds
from nmt.system.processes import agreed
from nmt.system.run import RunDirectory, load_config

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
    parser.add_argument("--config-dir", metavar="FOLDER", type=user_path)  # where the user's own recipes are
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
        parsed.overrides.append(f"{SEARCH_PATH}=[{quoted(os.path.abspath(parsed.config_dir))}]")
    return parsed


def parse_overrides(command: str, words: Iterable[str]) -> list[Override]:
    """Parse overrides. Raises UserError for those that cannot be parsed or whose keys of Hydra have no effect."""
    overrides = [_parse_override(_as_meant(word)) for word in words]
    taken = (*RUN_KEYS, *SWEEP_KEYS) if command == "train" else (SEARCH_PATH,)
    for override in overrides:
        key = str(override.key_or_group)
        if key.startswith("hydra") and not key.startswith(taken):
            word = format_value(override.input_line)
            raise UserError(
                f"{word}: of Hydra's keys, nmt-{command} takes only {', '.join(taken)}{nearest(key, taken)}"
            )
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


def _parse_override(word: str) -> Override:
    if "=" not in word and not word.startswith("~"):
        hint = f"; write run={word}" if os.path.isdir(word) else ""
        raise UserError(f"{format_value(word)}: expected KEY=VALUE or GROUP=CHOICE{hint}")
    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, RecursionError) as error:
        reason = format_value(str(error).partition("\n")[0])
        raise UserError(
            f"{format_value(word)}: cannot be parsed ({reason}); write no spaces around =, and quote values with "
            "characters other than ASCII letters, digits and . / - _ +, as in \"key='a=b'\""
        ) from None


def as_words(overrides: Iterable[Override]) -> list[str]:
    """Return the overrides as they are typed, for Hydra."""
    return [override.input_line or "" for override in overrides]


def last_overrides(loader: Any, words: Iterable[str]) -> dict[str, Override]:  # noqa: ANN401
    """Parse the words of a sweep; a later word for a key replaces an earlier one. loader: of Hydra, expands glob()."""
    overrides = OverridesParser.create(loader).parse_overrides(list(words))
    return {override.get_key_element(): override for override in overrides}


def _single_values(command: str, words: Sequence[str]) -> list[Override]:
    """Parse overrides of a command that is no sweep. Raises UserError for several values and for keys of a sweep."""
    overrides = parse_overrides(command, words)
    for override in overrides:
        if override.is_sweep_override():
            key, _, values = str(override.input_line).partition("=")
            remedies = [f"for a list give '{key}=[{values}]'"] if "(" not in values else []
            remedies += ["for a sweep add -m"] if command == "train" else []
            raise UserError(f"{override.input_line}: {'; '.join(remedies) or 'give a single value'}")
        if str(override.key_or_group).startswith(SWEEP_KEYS):
            raise UserError(f"{override.input_line}: is for a sweep; add -m")
    return overrides


def compose(command: str, schema: type[T], words: Sequence[str]) -> T:
    """Compose and check the configuration of a command from overrides, without changing Hydra's global state.

    Raises UserError with the message of the command.
    """
    words = as_words(_single_values(command, words))
    return _checked(command, schema, composed(command, words), words)[0]


def composed(command: str, words: Sequence[str]) -> DictConfig:
    """Compose the YAML files of a command, with Hydra's own section `hydra`, but check no value. Raises UserError."""
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
    except Exception as error:
        raise UserError(explain(error, command, words)) from error


def without_hydra(config: DictConfig) -> DictConfig:
    """Return the configuration without Hydra's own section."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def _checked(command: str, schema: type[T], config: DictConfig, words: Sequence[str]) -> tuple[T, dict[str, str]]:
    """Check what Hydra has composed from these words. size=auto becomes the size for the corpus.

    Returns the typed configuration and the choice of each group. Raises UserError.
    """
    if "thresholds" in config.get("size", {}):
        data, size = (_plain(command, config[section], words) for section in ("data", "size"))
        config = composed(command, [*without_size(words), f"size={_size_for_corpus(data, size['thresholds'])}"])
    values = _plain(command, without_hydra(config), words)
    if "experiment" in values:
        raise UserError("experiment: a recipe's file must begin with: # @package _global_ (and no byte order mark)")
    values.get("size", {}).pop("thresholds", None)  # of a recipe, whose size is chosen by now
    selected = config.hydra.runtime.choices.items()
    choices = {str(group): str(choice) for group, choice in selected if not str(group).startswith("hydra/")}
    return validated(schema, drop_unused_values(schema, values, words)), choices


def _plain(command: str, config: DictConfig, words: Sequence[str]) -> dict[str, Any]:
    """Convert to plain values, with references such as ${oc.env:HOME} resolved. Raises UserError."""
    with explained(command, words):
        return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def without_size(words: Iterable[str]) -> list[str]:
    """Return the overrides without size= and size.thresholds."""
    return [word for word in words if not word.lstrip("+~").startswith(("size=", "size.thresholds"))]


def _size_for_corpus(data: dict[str, Any], thresholds: dict[str, Any]) -> str:
    """Return the largest size whose threshold the number of training pairs reaches (configs/size/auto.yaml).

    Raises UserError if the corpus cannot be read or no size fits it.
    """
    from nmt.data.corpus import count_pairs, splits

    pairs = count_pairs(splits(validated_union(Data, data, "data"))["train"])
    checked = validated_union(SizeThresholds, thresholds, "size.thresholds")
    reached = {least: str(name) for name, least in checked if pairs >= least}
    if not reached:
        raise UserError(f"size.thresholds: no size begins at or below {pairs:,} training pairs; set one to 0")
    chosen = reached[max(reached)]
    log.info("size: %s, for %s training pairs", chosen, f"{pairs:,}")
    return chosen


class RunRequest(NamedTuple):
    """A run that the user asks for: a new one, or one to resume."""

    config: TrainConfig
    directory: Path
    overrides: list[str]  # what the user set, as typed, but for Hydra's own keys
    choices: dict[str, str]  # the choice of each group; {} for a resumed run, which has recorded them

    def is_complete(self, *ended: str) -> bool:
        """Has the run ended with this configuration and corpus? `ended` lists the statuses of a run that has ended."""
        from nmt.data.prepare import fingerprint_of

        run = RunDirectory(self.directory)
        if run.status() not in ended:
            return False  # before `fingerprint_of`, which reads the corpus and may take long
        fingerprint = fingerprint_of(self.config.data, self.config.tokenizer)
        return run.has_finished(self.config.model_dump(mode="json"), fingerprint)


def new_run(words: Sequence[str], config: DictConfig | None = None) -> RunRequest:
    """Compose a new run from overrides. `config` is what Hydra has composed from them, if that is known.

    Raises UserError for a mistake, and for overrides that need a sweep or resume a run.
    """
    overrides = _single_values("train", words)
    words = as_words(overrides)
    config = composed("train", words) if config is None else config
    varied = config.hydra.sweeper.get("params") or {}
    if "hydra.mode=RUN" not in words and varied.keys() - {each.get_key_element() for each in overrides}:
        raise UserError(
            f"experiment: this recipe varies {', '.join(varied)}; use it for a sweep of its own, with -m, or for a "
            "single run, with hydra.mode=RUN"
        )
    directory = user_path(agreed("run directory", str(config.hydra.run.dir)))
    values, choices = _checked("train", TrainConfig, config, words)
    if values.run is not None:
        raise UserError(f"run={values.run}: resumes a single run, but this starts a new one; leave it out")
    own = [word for word in words if not word.startswith("hydra")]
    return RunRequest(values.with_absolute_paths(), directory, own, choices)


def resumed_run(words: Sequence[str]) -> RunRequest:
    """Return the run that run= names, with its saved configuration, to which the other overrides are applied.

    Raises UserError for an override of a key that may not change.
    """
    overrides = _single_values("train", words)
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
    # Without an override, data.cache_dir followed NMT_CACHE, which may name another folder now.
    if "NMT_CACHE" in os.environ and "data.cache_dir" not in run.overrides():
        given.setdefault("data.cache_dir", os.environ["NMT_CACHE"])
    words = as_words(overrides)
    values = load_config(run.config).model_dump(mode="json")
    for key, value in _plain("train", OmegaConf.create(given), words).items():
        *sections, name = key.split(".")
        reduce(getitem, sections, values)[name] = value
    return RunRequest(validated(TrainConfig, values).with_absolute_paths(), run.path, words, {})
