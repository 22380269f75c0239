"""From a command line to a typed configuration: Hydra composes the YAML files, the schema checks the values."""

import logging
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import hydra
from hydra import initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from nmt import DISTRIBUTION
from nmt.cli import help
from nmt.config.compose import config_dir, drop_unused_values, validated, validated_union
from nmt.config.errors import UserError, format_value, nearest, plain_value, quoted, user_path
from nmt.config.schema.base import text_keys
from nmt.config.schema.data import Data
from nmt.config.schema.model import SizeThresholds
from nmt.system.processes import agreed

DRY_RUN = "--dry-run"  # option of nmt-train, which removes it from the arguments that Hydra gets
SWEEP_KEYS = ("hydra.sweep.", "hydra.launcher", "hydra.sweeper", "hydra/launcher", "hydra/sweeper")
TEXT_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")
HYDRA_DIRECTORIES = TEXT_KEYS[:2]  # Hydra creates these without expanding ~
OWN_VALUES = {"hydra.output_subdir": None, "hydra.job.chdir": False, "hydra/job_logging": "none"}  # nmt needs these
MAX_CHOICE = 100  # characters in the name of a choice, which is the name of a file
T = TypeVar("T", bound=BaseModel)
log = logging.getLogger(__name__)


def compose(
    command: str, schema: type[T], overrides: Sequence[str], auto_size: str | None = None, started: bool = False
) -> tuple[T, dict[str, str]]:
    """Compose and check the configuration of a command from overrides, without changing Hydra's global state.

    size=auto becomes `auto_size`, by default the size for the corpus. started: True if a command has started Hydra,
    which is then used. Returns the configuration and the choice of each group. Raises UserError with the message that
    the command would print.
    """
    overrides = with_texts_quoted(overrides, schema)
    for override in check(overrides, command):
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: several values need a sweep, which this is not")
    try:
        with nullcontext() if started else initialize_config_dir(str(config_dir()), version_base="1.3"):
            config = hydra.compose(command, list(overrides), return_hydra_config=True)
            if _has_automatic_size(config):
                others = without_size(overrides)
                size = auto_size or _size_for_corpus(config)
                config = hydra.compose(command, [*others, f"size={size}"], return_hydra_config=True)
                _drop_thresholds(config)
        _refuse_shadowed(config.hydra)
        values = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return _typed(schema, values, overrides), choices(config.hydra)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: a key within a list
        raise UserError(help.explain(error, command)) from None


def job_config(schema: type[T], config: DictConfig, command: str) -> T:
    """Check the configuration that Hydra composed for this job. size=auto becomes the size for the corpus.

    Raises UserError for a wrong value, OmegaConfBaseException for a missing value or an interpolation that fails.
    """
    job = cast(DictConfig, HydraConfig.get())
    overrides = job_overrides(job)
    _refuse_shadowed(job)
    if _has_automatic_size(config):
        size = _size_for_corpus(config)
        with read_write(job):
            job.runtime.choices["size"] = size  # so that the run records the size in place of "auto"
        searched = [word for word in job_overrides(job, "hydra") if word.startswith("hydra.searchpath=")]
        config = hydra.compose(command, [*searched, *without_size(overrides), f"size={size}"])
        _drop_thresholds(config)
    return _typed(schema, config, overrides)


def choices(hydra_config: Any) -> dict[str, str]:  # noqa: ANN401
    """Return the selected choice of each group."""
    selected = hydra_config.runtime.choices
    return {str(group): str(choice) for group, choice in selected.items() if not str(group).startswith("hydra/")}


def job_overrides(hydra_config: Any, node: str = "task") -> list[str]:  # noqa: ANN401
    """Return a job's overrides; with node="hydra", those of Hydra's own keys. Interpolations stay unresolved."""
    overrides: list[str] = OmegaConf.to_container(hydra_config.overrides[node], resolve=False)  # type: ignore[assignment]
    return overrides


def without_size(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without size= and size.thresholds."""
    return [override for override in overrides if not override.lstrip("+~").startswith(("size=", "size.thresholds"))]


def _typed(schema: type[T], config: DictConfig, overrides: Sequence[str]) -> T:
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    return validated(schema, drop_unused_values(schema, values, overrides))


def _has_automatic_size(config: DictConfig) -> bool:
    return "thresholds" in config.get("size", {})


def _drop_thresholds(config: DictConfig) -> None:
    """Remove the thresholds of size=auto, which a recipe may have set, from the configuration with the chosen size."""
    with open_dict(config):
        config.size.pop("thresholds", None)


def _refuse_shadowed(hydra_config: Any) -> None:  # noqa: ANN401
    """Raise UserError for a choice that also exists in the user's own folder: Hydra would take that of nmt."""
    for folder in user_folders(hydra_config):
        for group, choice in choices(hydra_config).items():
            file = folder / group / f"{choice}.yaml"
            if file.is_file() and (config_dir() / group / f"{choice}.yaml").is_file():
                raise UserError(
                    f"{group}={choice}: {file} has the name of a choice of nmt, which would be used; rename it"
                )


def user_folders(hydra_config: Any) -> list[Path]:  # noqa: ANN401
    """List the user's own folders of configurations: those of --config-dir and hydra.searchpath."""
    folders = [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"]
    return [folder for folder in folders if folder != config_dir()]


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


def argument_parser(command: str) -> ArgumentParser:
    """Return Hydra's parser of options, but with our version, and with UserError instead of a printed usage."""
    parser: ArgumentParser = get_args_parser()
    options = [option for action in parser._actions for option in action.option_strings]

    def error(message: str) -> NoReturn:
        allowed = [*options, DRY_RUN] if command == "train" else options
        raise UserError(f"{format_value(message, 200)}{nearest(message.rpartition(' ')[2], allowed)}")

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:
        if "--version" in action.option_strings:
            action.version = f"nmt {version(DISTRIBUTION)} (Hydra {version('hydra-core')})"  # type: ignore[attr-defined]
    return parser


def parse_arguments(
    parser: ArgumentParser, arguments: Sequence[str], schema: type[BaseModel], command: str
) -> Namespace:
    """Parse a command line into Hydra's options. The texts in their `overrides` are quoted for Hydra.

    Raises UserError for arguments that cannot work or would have no effect.
    """
    parsed = parser.parse_intermixed_args(list(arguments))
    if parsed.multirun and command != "train":
        instead = "; one comparison takes all runs, as in runs=[A,B]" if command == "compare" else ""
        raise UserError(f"-m: is for nmt-train only{instead}")
    if parsed.experimental_rerun:
        raise UserError("--experimental-rerun: would execute code from a file; resume a run with run=DIR")
    if parsed.config_name or parsed.config_path:
        option = "--config-name" if parsed.config_name else "--config-path"
        raise UserError(
            f"{option}: nmt has its own configuration; write a recipe FOLDER/experiment/NAME.yaml, and give "
            "--config-dir FOLDER experiment=NAME"
        )
    parsed.overrides = with_texts_quoted(parsed.overrides, schema)
    check(parsed.overrides, command)
    return parsed


def check(overrides: Sequence[str], command: str) -> list[Override]:
    """Parse overrides. Raises UserError for those that cannot be parsed or would have no effect."""
    parsed = [_parsed(override) for override in overrides]
    keys = {str(override.key_or_group) for override in parsed}
    for override in parsed:
        key, line = str(override.key_or_group), format_value(override.input_line)
        if command != "train" and key.startswith(("hydra.run.", *SWEEP_KEYS)):
            raise UserError(f"{line}: is for nmt-train only")
        if key == "hydra.run.dir" and "run" in keys:
            raise UserError(f"{line}: run= resumes in the run's own directory; leave it out")
        if key in OWN_VALUES and override.value() != OWN_VALUES[key]:
            raise UserError(f"{line}: nmt writes its own files and log in the run's directory; leave it out")
        names_choices = (config_dir() / key).is_dir() and not (override.is_delete() or override.is_sweep_override())
        if names_choices and not _may_be_choice(override.value()):
            others = ", ".join(help.choices_of(key, command))
            raise UserError(f"{line}: {'leave it out' if key == help.RECIPES else f'choose one of {others}'}")
        if command == "train":
            _refuse_choice_as_value(override)
    _warn_of_repeated(parsed)
    return parsed


def _may_be_choice(value: object) -> bool:
    """Check if a value may name a file of a group, or several files. Hydra fails at other values with a traceback."""
    if isinstance(value, list):
        return all(isinstance(name, str) and _may_be_choice(name) for name in value)
    return value is not None and len(str(value)) <= MAX_CHOICE


def _parsed(override: str) -> Override:
    if "=" not in override and not override.startswith("~"):
        hint = ""
        if os.path.exists(override):
            hint = f"; write run={override}" if os.path.isdir(override) else f"; to read this file, write < {override}"
        raise UserError(f"{format_value(override)}: expected KEY=VALUE or GROUP=CHOICE{hint}")
    try:
        return OverridesParser.create().parse_override(override)
    except (HydraException, ValueError, RecursionError) as error:
        reason = format_value(str(error).partition("\n")[0])
        raise UserError(
            f"{format_value(override)}: cannot be parsed ({reason}); write no spaces around =, and quote values with "
            "characters other than ASCII letters, digits and . / - _ +, as in \"key='a=b'\""
        ) from None


def _refuse_choice_as_value(override: Override) -> None:
    """Raises UserError for a choice that is written like a value: attention.score=general, or optimizer.kind=sgd."""
    key, _, value = str(override.input_line).lstrip("+").partition("=")
    group = key.removesuffix(".kind").replace(".", "/")
    is_group = "." in key and (config_dir() / group).is_dir()
    if is_group and not override.is_delete() and not isinstance(override.value(), dict):
        line, names = format_value(override.input_line), [path.stem for path in (config_dir() / group).glob("*.yaml")]
        choice = value if value in names else f"CHOICE{nearest(value, names)}"
        raise UserError(f"{line}: a choice sets several values; write {group}={choice}")


def _warn_of_repeated(overrides: Sequence[Override]) -> None:
    """Warn where two arguments set one key: the last one wins."""
    last: dict[str, Override] = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+")
        before = last.get(key)
        if before is not None and before.value() != override.value() and not before.is_delete():
            lines = format_value(before.input_line), format_value(override.input_line)
            log.warning("%s: overridden by the later %s", *lines)
        last[key] = override


def with_texts_quoted(overrides: Sequence[str], schema: type[BaseModel]) -> list[str]:
    """Expand ~ in overrides, and quote texts that Hydra would read as a number or truth value, such as 2024_01 or nan.

    Texts are paths, names and choices. A shell expands ~ only at the start of a word, not after `=`. A prefix ++ has no
    effect, since all keys exist, and is removed.
    """
    keys = {*text_keys(schema), *TEXT_KEYS}
    return [_with_text_quoted(override.removeprefix("++"), keys) for override in overrides]


def _with_text_quoted(override: str, keys: Collection[str]) -> str:
    key, _, text = override.partition("=")
    if text.startswith("~/") and re.fullmatch(r"[a-zA-Z0-9_./-]*", text[1:]):
        return f"{key}={quoted(user_path(text))}"
    if key in HYDRA_DIRECTORIES and (value := value_of(override)).startswith("~"):
        return f"{key}={quoted(user_path(value))}"
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


def _run_dir(run: object, new: str) -> str:
    """Return the directory of the run to resume, or `new` if `run` is None.

    Raises UserError if there is no directory `run`, before Hydra creates anything.
    """
    if run is None:
        return agreed("run directory", new)
    if not isinstance(run, str):
        raise UserError(f"run={format_value(run)}: run= resumes one run")
    path = user_path(run)
    if os.path.isfile(path):  # unlike the methods of Path, these functions raise nothing
        raise UserError(
            f"run={format_value(run)}: is a file; an archive cannot be resumed, but training.start_from=FILE "
            "starts a new run from its weights"
        )
    if not os.path.isdir(path):
        raise UserError(
            f"run={format_value(run)}: no such directory; run= resumes a run, hydra.run.dir= names a new one"
        )
    return str(path)


def _for_several(run: str | list[str] | None, folder: str) -> str | None:
    """Return `folder` for the results of several runs or of an archive; None for one run, which holds its results."""
    runs = [run] if run is None or isinstance(run, str) else run
    return folder if len(runs) > 1 or any(user_path(str(name)).is_file() for name in runs) else None


# Registered at import, because a launcher's worker process imports modules but runs no `main`. YAML files call these
# functions.
OmegaConf.register_new_resolver("run_dir", _run_dir, replace=True)
OmegaConf.register_new_resolver("for_several", _for_several, replace=True)
OmegaConf.register_new_resolver("choices", help.all_choices, replace=True)
OmegaConf.register_new_resolver("values", help.values, replace=True)
