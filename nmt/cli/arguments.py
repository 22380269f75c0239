"""Check command-line arguments before Hydra reads them.

Hydra would hang on some mistakes, ignore others, or answer with its own usage page; each is reported in one line.
"""

import itertools
import logging
import os
import re
from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from pydantic import BaseModel

from nmt.cli.help import choices_of
from nmt.config.compose import config_dir
from nmt.config.errors import CONTROL, UserError, format_value, nearest, removed
from nmt.config.keys import text_keys
from nmt.config.overrides import quoted, user_path

MAX_LENGTH = 20_000  # characters of an argument: Hydra's parser takes seconds for more
MAX_DEPTH = 30  # of nested brackets
MAX_JOBS = 10_000  # in a sweep: Hydra lists all jobs before it starts the first
CHOICE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # a file in the group's folder or below
SWEEP_KEYS = ("hydra.launcher", "hydra.sweeper", "hydra/launcher", "hydra/sweeper", "hydra.mode")
TEXT_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")
PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[\],]|[^'"\[\],]+""")  # quoted, or not
DRY_RUN = "--dry-run"  # of nmt-train; Hydra does not see it
TRAIN_KEYS = ("hydra.run.", "hydra.sweep.", *SWEEP_KEYS)
HYDRA_KEYS = (  # which Hydra sets itself, ignoring overrides
    "hydra.runtime.",
    "hydra.overrides.",
    *(f"hydra.job.{name}" for name in ("id", "num", "override_dirname", "config_name")),
)
log = logging.getLogger(__name__)


def check(arguments: Sequence[str], command: str) -> list[Override]:
    """The parsed overrides. Raises UserError for arguments that cannot work or would have no effect."""
    parser = get_args_parser()
    _adapt(parser, command)
    for argument in arguments:
        _check_readable(argument)
    options = parser.parse_args(list(arguments))
    if options.multirun and command != "train":
        instead = "; one comparison takes all runs, as in runs=[A,B]" if command == "compare" else ""
        raise UserError(f"-m: is for nmt-train only{instead}")
    if options.experimental_rerun:
        raise UserError("--experimental-rerun: would execute code from a file; resume a run with run=DIR")
    overrides = _parsed(options.overrides)
    for override in overrides:
        _check_choice(override, command)
        if command == "train":
            _check_choice_by_value(override)
    _check_effective(overrides, command)
    _check_number_of_jobs(overrides)
    _warn_of_repeated(overrides)
    return overrides


def new_folders(arguments: Sequence[str]) -> list[Path]:
    """The folders that Hydra would create for hydra.run.dir=, the innermost first."""
    paths = [Path(value_of(argument)) for argument in arguments if argument.startswith("hydra.run.dir=")]
    return [path for path in (paths[-1], *paths[-1].parents) if not os.path.lexists(path)] if paths else []


def with_run_dir(arguments: Sequence[str], path: Path | None) -> list[str]:
    """The arguments with this hydra.run.dir; as they are if it is None."""
    if path is None:
        return list(arguments)
    others = [argument for argument in arguments if not argument.startswith("hydra.run.dir=")]
    return [*others, f"hydra.run.dir={quoted(str(path))}"]


def value_of(argument: str) -> str:
    """The text after the =, unquoted as Hydra does."""
    text = argument.partition("=")[2]
    with suppress(HydraException, ValueError):
        value = OverridesParser.create().parse_override(argument).value()
        return value if isinstance(value, str) else text
    return text


def as_typed(argument: str, keys: Collection[str]) -> str:
    """KEY=TEXT with quotes around text that Hydra would read as a number or as true or false, such as 2024_01 (202401)
    or nan, if KEY is one of the `keys`, whose values are text. Elements of lists and sweeps count one by one."""
    key, _, text = argument.partition("=")
    parts = PARTS.findall(text)
    if key.lstrip("+") not in keys or "".join(parts) != text or set(text) & set("{}()$"):
        return argument
    return f"{key}={''.join(quoted(part.strip()) if _is_other_value(part) else part for part in parts)}"


def _is_other_value(text: str) -> bool:
    with suppress(HydraException, ValueError):
        return isinstance(OverridesParser.create().parse_override(f"key={text}").value(), bool | int | float)
    return False


def prepared(arguments: Sequence[str], schema: type[BaseModel]) -> list[str]:
    """The arguments with home directories in place of ~, and with paths and names as they were typed."""
    keys = {*text_keys(schema), *TEXT_KEYS}
    return [as_typed(with_home(argument), keys) for argument in arguments]


def with_home(argument: str) -> str:
    """KEY=~/PATH with the home directory in place of ~, which a shell expands only at the start of a word."""
    key, _, value = argument.partition("=")
    if not value.startswith("~/"):
        return argument
    path = str(user_path(value))
    return f"{key}={quoted(path) if re.fullmatch(r'[a-zA-Z0-9_./-]*', value[1:]) else path}"


def job_overrides(hydra_config: Any, node: str = "task") -> list[str]:  # noqa: ANN401
    """A job's overrides, or Hydra's own with node="hydra", as written: without resolving interpolations in them."""
    overrides: list[str] = OmegaConf.to_container(hydra_config.overrides[node], resolve=False)  # type: ignore[assignment]
    return overrides


def _adapt(parser: ArgumentParser, command: str) -> None:
    """Make Hydra's parser raise UserError instead of printing its usage, and print our version."""

    def error(message: str) -> NoReturn:
        options = [option for action in parser._actions for option in action.option_strings]
        options += [DRY_RUN] if command == "train" else []
        reason, _, words = message.partition(": ")
        if reason == "unrecognized arguments" and not re.search(r"(^| )-", words):
            raise UserError(
                f"{format_value(words)}: comes after an option; options such as -m come first, then all KEY=VALUE"
            )
        raise UserError(f"{format_value(message, 200)}{nearest(message.rpartition(' ')[2], options)}")

    parser.error = error  # type: ignore[method-assign]
    for action in parser._actions:
        if "--version" in action.option_strings:
            action.version = f"nmt {version('nmt')} (Hydra {version('hydra-core')})"  # type: ignore[attr-defined]


def _check_readable(argument: str) -> None:
    depths = itertools.accumulate((char in "([{") - (char in ")]}") for char in argument)
    reason = None
    if len(argument) > MAX_LENGTH:
        reason = f"has {len(argument):,} characters; the limit is {MAX_LENGTH:,}"
    elif max(depths, default=0) > MAX_DEPTH:
        reason = f"nests brackets deeper than {MAX_DEPTH}"
    elif argument.startswith("="):
        reason = "has no key before the ="
    elif CONTROL.search(argument):
        reason = "contains control characters or bytes that are not UTF-8"
    if reason:
        raise UserError(f"{format_value(argument)}: {reason}")


def _parsed(arguments: Sequence[str]) -> list[Override]:
    parser, overrides = OverridesParser.create(), []
    for argument in arguments:
        try:
            overrides += parser.parse_overrides([argument])
        except OverrideParseException as error:
            if "=" not in argument:
                raise UserError(f"{format_value(argument)}: expected KEY=VALUE or GROUP=CHOICE") from None
            reason, hint = _parse_error(argument, error), _hint(argument)
            raise UserError(f"{format_value(argument)}: cannot be parsed ({reason}){hint}") from None
        except ValueError as error:  # Python parses no integer of more than 4300 digits
            reason = format_value(str(error).partition(";")[0])
            raise UserError(f"{format_value(argument)}: cannot be parsed ({reason})") from None
    return overrides


def _parse_error(argument: str, error: OverrideParseException) -> str:
    """Which character is wrong. Hydra's parser marks it with a caret on the next line, or quotes it."""
    value = argument.partition("=")[2]
    for pair in ("[]", "{}", "()"):
        if value.count(pair[0]) != value.count(pair[1]):
            return f"unbalanced {pair}"
    for quote in "'\"":
        if value.count(quote) % 2:
            return f"unbalanced {quote}"
    message = str(error)
    if caret := re.search(r"^(.*)\n( *)\^$", message, re.MULTILINE):
        start = len(caret[2])
        return f"'{format_value(caret[1][start : start + 1])}' is unexpected"
    if quotation := re.search(r"input '(.*)'", message):
        return f"'{format_value(quotation[1])}' is unexpected"
    return format_value(message.partition("\n")[0], 200)


def _hint(argument: str) -> str:
    key, _, value = argument.partition("=")
    if key.endswith(" ") or value.startswith(" "):
        return "; write no spaces around ="
    return "; quote values with characters other than ASCII letters, digits and . / - _ +, as in \"key='a=b'\""


def _check_choice_by_value(override: Override) -> None:
    """Refuse a choice written with a dot (attention.score=dot) or by its kind (optimizer.kind=sgd): a choice sets
    several values."""
    key, value = str(override.key_or_group), _value(override)
    section, _, last = key.rpartition(".")
    group = _group_of(section if last == "kind" else key) if section else None
    if group is None or override.is_delete() or isinstance(override.value(), dict):
        return
    if message := removed(group, value):
        raise UserError(message)
    choices = choices_of(group.partition("@")[0], "train")
    right = f"{group}={value}" if {*value.split(",")} <= {*choices} else f"{group}=CHOICE, one of {', '.join(choices)}"
    raise UserError(f"{format_value(override.input_line)}: a choice sets several values; write {right}")


def _group_of(section: str) -> str | None:
    """The configuration group whose choices fill a section, as written in an argument; None for other sections."""
    group = section.replace(".", "/")
    part = f"attention/{section.removeprefix('encoder.self_attention.')}"  # self-attention has the same parts
    if (config_dir() / group).is_dir():
        return group
    return f"{part}@{section}" if (config_dir() / part).is_dir() else None


def _check_choice(override: Override, command: str) -> None:
    """Refuse files outside the group: Hydra would take encoder=../train, a whole configuration, for an encoder's."""
    group, value = config_dir() / str(override.key_or_group), override.value()
    if not group.is_dir() or override.is_delete() or override.is_sweep_override():
        return
    if value is None and group.name == "experiment":
        return
    choices = choices_of(str(override.key_or_group), command)
    hidden = {path.stem for path in group.glob("*.yaml")} - set(choices)  # parts of choices, choices of other commands
    for name in value if isinstance(value, list) else [value]:
        if not (isinstance(name, str) and CHOICE.fullmatch(name)) or name in hidden:
            raise UserError(f"{format_value(override.input_line)}: not one of {', '.join(choices)}")


def _check_effective(overrides: Sequence[Override], command: str) -> None:
    """Refuse keys that exist but would have no effect."""
    keys = {str(override.key_or_group): override for override in overrides}
    for key, override in keys.items():
        reason = None
        if key == "hydra.output_subdir":
            reason = "a run writes its own config.yaml; leave it out"
        elif key.startswith(HYDRA_KEYS):
            reason = "Hydra sets this itself"
        elif command != "train" and key.startswith(TRAIN_KEYS):
            names = {"evaluate": "folder", "compare": "folder", "export": "file"}
            where = f"; output= sets the {names[command]} of nmt-{command}" if command in names else ""
            reason = f"is for nmt-train only{where}"
        elif key == "hydra.run.dir" and "run" in keys:
            reason = "run= resumes in the run's own directory; leave it out"
        if reason:
            raise UserError(f"{format_value(override.input_line)}: {reason}")


def _check_number_of_jobs(overrides: Sequence[Override]) -> None:
    count = 1
    searching = any(override.key_or_group == "hydra/sweeper" and override.value() == "optuna" for override in overrides)
    for override in overrides:
        if override.is_discrete_sweep():
            sweep = override.value()
            if isinstance(sweep, RangeSweep) and not sweep.step:
                raise UserError(f"{format_value(override.input_line)}: never ends with a step of 0")
            count = _number_of_values(sweep) * (1 if searching else count)
        if count > MAX_JOBS:
            raise UserError(f"{format_value(override.input_line)}: makes more than {MAX_JOBS:,} jobs in one sweep")


def _number_of_values(sweep: Any) -> int:  # noqa: ANN401
    if isinstance(sweep, RangeSweep) and sweep.start is not None and sweep.stop is not None:
        return max(0, int((sweep.stop - sweep.start) / sweep.step))
    return len(getattr(sweep, "list", "1"))


def _warn_of_repeated(overrides: Sequence[Override]) -> None:
    """Warn where two arguments set one key: the last one wins."""
    last: dict[str, Override] = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+")
        before = last.get(key)
        if before is not None and _value(before) != _value(override) and not before.is_delete():
            lines = format_value(before.input_line), format_value(override.input_line)
            log.warning("%s: overridden by the later %s", *lines)
        last[key] = override


def _value(override: Override) -> str:
    return str(override.input_line).partition("=")[2]
