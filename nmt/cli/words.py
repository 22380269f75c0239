"""The words of a command line, before Hydra has them: what it would hang at, drop without a word, or answer with a page
of its own usage is told in one line."""

import itertools
import logging
import os
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

from nmt.cli.explain import choices_of
from nmt.config.compose import config_dir
from nmt.config.errors import CONTROL, UserError, format_value, nearest
from nmt.config.overrides import quoted, user_path

LONGEST = 20_000  # characters of a word: Hydra's parser takes seconds for as many
DEEPEST = 30  # brackets in brackets
MOST_JOBS = 10_000  # of a sweep: Hydra lists all before the first
CHOICE = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # of a group: a file in its folder, or in one below
FOLDERS = ("hydra.run.", "hydra.sweep.")
OF_SWEEPS = ("hydra.launcher", "hydra.sweeper", "hydra/launcher", "hydra/sweeper", "hydra.mode")
# Hydra writes these itself, over what is given.
HYDRAS_OWN = (
    "hydra.runtime.",
    "hydra.overrides.",
    *(f"hydra.job.{name}" for name in ("id", "num", "override_dirname", "config_name")),
)
log = logging.getLogger(__name__)


def check(words: Sequence[str], command: str) -> list[Override]:
    """Returns the overrides among them. Raises UserError for words that cannot be meant."""
    parser = get_args_parser()
    _speak_for_nmt(parser)
    for word in words:
        _refuse_unreadable(word)
    arguments = parser.parse_args(list(words))
    if arguments.multirun and command != "train":
        instead = "one comparison takes all runs, as in runs=[A,B]" if command == "compare" else "it sweeps nothing"
        raise UserError(f"-m: is for nmt-train; {instead}; leave it out")
    if arguments.experimental_rerun:
        raise UserError("--experimental-rerun: would run code of a file; a run goes on with run=DIR")
    overrides = _parsed(arguments.overrides)
    for override in overrides:
        _refuse_choice_elsewhere(override, command)
        if command == "train":
            _refuse_choice_as_value(override)
    _refuse_ignored(overrides, command)
    _refuse_endless(overrides)
    _tell_repeated(overrides)
    return overrides


def new_folders(words: Sequence[str]) -> list[Path]:
    """What Hydra would make for hydra.run.dir=, the innermost first."""
    named = [Path(value_of(word)) for word in words if word.startswith("hydra.run.dir=")]
    return [place for place in (named[-1], *named[-1].parents) if not os.path.lexists(place)] if named else []


def value_of(word: str) -> str:
    """What stands behind the =, without quotes of Hydra's; as it is written where that cannot be read."""
    with suppress(HydraException, ValueError):
        return str(OverridesParser.create().parse_override(word).value())
    return word.partition("=")[2]


def with_home(word: str) -> str:
    """KEY=~/PLACE with the user's folder in it, as a shell writes it where the ~ comes first."""
    key, _, value = word.partition("=")
    if not value.startswith("~/"):
        return word
    place = str(user_path(value))
    return f"{key}={quoted(place) if re.fullmatch(r'[a-zA-Z0-9_./-]*', value[1:]) else place}"


def given(hydra_config: Any, node: str = "task") -> list[str]:  # noqa: ANN401
    """A job's overrides (or Hydra's own, node="hydra") as they are written: read one by one, OmegaConf would look up
    what they refer to, and not find it."""
    overrides: list[str] = OmegaConf.to_container(hydra_config.overrides[node], resolve=False)  # type: ignore[assignment]
    return overrides


def _speak_for_nmt(parser: ArgumentParser) -> None:
    """Let Hydra's parser refuse in one line, not with its usage, and know our version."""

    def refuse(message: str) -> NoReturn:
        options = [option for action in parser._actions for option in action.option_strings]
        reason, _, words = message.partition(": ")
        if reason == "unrecognized arguments" and not re.search(r"(^| )-", words):
            raise UserError(
                f"{format_value(words)}: comes after an option; options such as -m come first, then all KEY=VALUE"
            )
        raise UserError(f"{format_value(message, 200)}{nearest(message.rpartition(' ')[2], options)}")

    parser.error = refuse  # type: ignore[method-assign]
    for action in parser._actions:
        if "--version" in action.option_strings:
            action.version = f"nmt {version('nmt')} (Hydra {version('hydra-core')})"  # type: ignore[attr-defined]


def _refuse_unreadable(word: str) -> None:
    if len(word) > LONGEST:
        raise UserError(f"{format_value(word)}: has {len(word):,} characters; the most that are read are {LONGEST:,}")
    depths = itertools.accumulate((char in "([{") - (char in ")]}") for char in word)
    if max(depths, default=0) > DEEPEST:
        raise UserError(f"{format_value(word)}: nests brackets deeper than {DEEPEST}")
    if word.startswith("="):
        raise UserError(f"{format_value(word)}: has no key before the =")
    if CONTROL.search(word):
        raise UserError(f"{format_value(word)}: holds control characters or bytes that are not UTF-8")


def _parsed(words: Sequence[str]) -> list[Override]:
    parser, overrides = OverridesParser.create(), []
    for word in words:
        try:
            overrides += parser.parse_overrides([word])
        except OverrideParseException as error:
            if "=" not in word:
                raise UserError(f"{format_value(word)}: is no KEY=VALUE or GROUP=CHOICE") from None
            raise UserError(f"{format_value(word)}: cannot be read ({_reason(word, error)}){_hint(word)}") from None
        except ValueError as error:  # Python reads no integer of more than 4300 digits
            raise UserError(
                f"{format_value(word)}: cannot be read ({format_value(str(error).partition(';')[0])})"
            ) from None
    return overrides


def _reason(word: str, error: OverrideParseException) -> str:
    """Which sign is wrong. Hydra's parser points at it with a caret in a line of its own, or quotes it."""
    value = word.partition("=")[2]
    for pair in ("[]", "{}", "()"):
        if value.count(pair[0]) != value.count(pair[1]):
            return f"unbalanced {pair}"
    for quote in "'\"":
        if value.count(quote) % 2:
            return f"unbalanced {quote}"
    message = str(error)
    if pointed := re.search(r"^(.*)\n( *)\^$", message, re.MULTILINE):
        start = len(pointed[2])
        return f"'{format_value(pointed[1][start : start + 1])}' is unexpected"
    if quoted_sign := re.search(r"input '(.*)'", message):
        return f"'{format_value(quoted_sign[1])}' is unexpected"
    return format_value(message.partition("\n")[0], 200)


def _hint(word: str) -> str:
    if " =" in word.partition("=")[0] + "=" or word.partition("=")[2].startswith(" "):
        return "; no blanks around ="
    return "; a value with other signs than ASCII letters, digits and . / - _ + needs quotes of its own: \"key='a=b'\""


def _refuse_choice_as_value(override: Override) -> None:
    """A choice given by a dot, attention.score=dot, or by its kind, optimizer.kind=sgd: it sets more than one value."""
    key, value = str(override.key_or_group), _value(override)
    section, _, last = key.rpartition(".")
    group = _group_of(section if last == "kind" else key) if section else None
    if group is None or override.is_delete() or isinstance(override.value(), dict):
        return
    choices = choices_of(group.partition("@")[0], "train")
    right = f"{group}={value}" if {*value.split(",")} <= {*choices} else f"{group}= and one of {', '.join(choices)}"
    raise UserError(f"{format_value(override.input_line)}: a choice sets several values; give {right}")


def _group_of(section: str) -> str | None:
    """The group that a section's values are chosen from, as a word names it; None if there is none."""
    group = section.replace(".", "/")
    part = f"attention/{section.removeprefix('encoder.self_attention.')}"  # self-attention takes the same parts
    if (config_dir() / group).is_dir():
        return group
    return f"{part}@{section}" if (config_dir() / part).is_dir() else None


def _refuse_choice_elsewhere(override: Override, command: str) -> None:
    """Hydra would look for ../train too, and take a command's whole configuration for an encoder's."""
    group, choice = config_dir() / str(override.key_or_group), override.value()
    if (
        not group.is_dir()
        or override.is_delete()
        or override.is_sweep_override()
        or (choice is None and group.name == "experiment")
    ):
        return
    given = choice if isinstance(choice, list) else [choice]
    choices = choices_of(str(override.key_or_group), command)
    parts = {path.stem for path in group.glob("*.yaml")} - set(choices)  # of other choices or other commands
    if not all(isinstance(each, str) and CHOICE.fullmatch(each) and each not in parts for each in given):
        raise UserError(f"{format_value(override.input_line)}: not one of {', '.join(choices)}")


def _refuse_ignored(overrides: Sequence[Override], command: str) -> None:
    """Keys that are known and yet would change nothing."""
    keys = {str(override.key_or_group): override for override in overrides}
    for key, override in keys.items():
        if key == "hydra.output_subdir":
            raise UserError(f"{format_value(override.input_line)}: a run keeps its own config.yaml; leave it out")
        if key.startswith(HYDRAS_OWN):
            raise UserError(f"{format_value(override.input_line)}: Hydra sets this itself")
        if command != "train" and key.startswith((*FOLDERS, *OF_SWEEPS)):
            where = "; output= says where it writes" if command != "translate" else ""
            raise UserError(f"{format_value(override.input_line)}: is for nmt-train, nmt-{command} makes no run{where}")
    if "run" in keys and "hydra.run.dir" in keys:
        raise UserError(
            f"{format_value(keys['hydra.run.dir'].input_line)}: run= goes on in its own directory; leave it out"
        )


def _refuse_endless(overrides: Sequence[Override]) -> None:
    count = 1
    searching = any(each.key_or_group == "hydra/sweeper" and each.value() == "optuna" for each in overrides)
    for override in overrides:
        if override.is_discrete_sweep():
            swept = override.value()
            if isinstance(swept, RangeSweep) and not swept.step:
                raise UserError(f"{format_value(override.input_line)}: never ends with a step of 0")
            count = _number_of_values(override) * (1 if searching else count)
        if count > MOST_JOBS:
            raise UserError(f"{format_value(override.input_line)}: makes more than {MOST_JOBS:,} jobs of one sweep")


def _number_of_values(override: Override) -> int:
    swept = override.value()
    if isinstance(swept, RangeSweep) and swept.start is not None and swept.stop is not None:
        return max(0, int((swept.stop - swept.start) / swept.step))
    return len(getattr(swept, "list", "1"))


def _tell_repeated(overrides: Sequence[Override]) -> None:
    """Of two values of one key the last counts, as in every command; the other is not dropped without a word."""
    last: dict[str, Override] = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+")
        before = last.get(key)
        if before is not None and _value(before) != _value(override) and not before.is_delete():
            log.warning(
                "%s: given again as %s, which counts",
                format_value(before.input_line),
                format_value(override.input_line),
            )
        last[key] = override


def _value(override: Override) -> str:
    return str(override.input_line).partition("=")[2]
