"""Errors of Hydra in one line for the user, with the key and the nearest valid name."""

import re
from collections.abc import Sequence

from hydra.errors import MissingConfigException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nmt.cli.config_files import RECIPES, choices_of, choices_with, group_files, keys_in, known_keys
from nmt.config.checks import config_dir
from nmt.config.errors import UserError, nearest, override_values


def explain(error: BaseException, command: str, words: Sequence[str] = ()) -> str:
    """Explain an error to the user, one line for each problem; `words` are the overrides that led to it."""
    if mistake := next((each for each in (error, error.__cause__) if isinstance(each, UserError)), None):
        return str(mistake)  # a cause where Hydra called what raised it
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _explain_hydra(error, command, words)


def _explain_hydra(error: BaseException, command: str, words: Sequence[str]) -> str:
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_choice(error.missing_cfg_file, error.options or [], command)
    if match := re.search("^Could not override '(.*?)'", text):
        inner = getattr(error.__cause__, "full_key", None) or ""  # for training={x:1}, training.x
        return _unknown_key(max(match[1], inner, key=len), command, words)
    if "Interpolation key 'size." in text:
        return "size=auto is resolved from the corpus when training starts; set size=small, base or large to see values"
    if match := re.search(r"hydra_plugins\.hydra_(\w+)_launcher", text):
        return f"hydra/launcher: {match[1]} is not installed: pip install hydra-{match[1]}-launcher"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("See http")]
    if isinstance(error, OmegaConfBaseException) and (key := error.full_key):
        is_missing = isinstance(error, MissingMandatoryValue)
        return f"{key}: missing; give it as {key}=..." if is_missing else f"{key}: {lines[0]}"
    return " ".join(dict.fromkeys(lines)) or type(error).__name__


def _unknown_key(key: str, command: str, words: Sequence[str]) -> str:
    """Say that a key is unknown, or not a key of the choice that `words` make, and which one is meant."""
    keys = known_keys(command)
    section, _, name = key.rpartition(".")
    if key not in keys:
        others = [other for other in keys if not other.startswith("size.")]  # other keys take their values from size
        return f"{key}: unknown key{nearest(key, others)} (nmt-{command} --help lists all)"
    if "/" in key:
        group, _, part = key.partition("/")
        return f"{key}: the chosen {group} has no {part}; choose another {group}"
    chosen = group_files(command).get((section, str(override_values(words).get(section))))
    same_name = [other for other in (keys_in(chosen) if chosen else []) if other.endswith(f".{name}")]
    available = f"; available with {', '.join(choices_with(key))}"
    return f"{key}: not a key of the chosen {section}{nearest(name, same_name) or available}"


def _unknown_choice(path: str, options: Sequence[str], command: str) -> str:
    """Say that a choice such as "attention/bahdanaw" does not exist; `options` are the choices that Hydra finds."""
    group, _, choice = path.partition("/") if path.startswith(f"{RECIPES}/") else path.rpartition("/")
    known = choices_of(group, command)
    others = [option for option in options if not (config_dir() / group / f"{option}.yaml").exists()]
    return f"{group}={choice}: not one of {', '.join([*known, *others])}{nearest(choice, [*known, *others])}"
