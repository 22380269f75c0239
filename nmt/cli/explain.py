"""Errors of Hydra in one line for the user, with the key and the nearest valid name."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import yaml
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nmt.config.compose import config_dir, flatten
from nmt.config.errors import UserError, format_value, nearest

RECIPES = "experiment"  # subfolders of this group hold choices; a subfolder of any other group is a group
Words = Sequence[str]


def explain(error: BaseException, command: str, words: Words = ()) -> str:
    """Explain an error to the user, one line for each problem; `words` are the overrides that led to it."""
    if mistake := next((each for each in (error, error.__cause__) if isinstance(each, UserError)), None):
        return str(mistake)  # a cause where Hydra called what raised it
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See http")]
    for pattern, explanation in EXPLANATIONS.items():
        # Hydra lists choices below "Available options in ...".
        if match := re.search(pattern, "\n".join(lines), re.MULTILINE):
            if message := explanation(match, command, words):
                return message
            break
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: missing; give it as {error.full_key}=..."
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        references = " ".join(format_value(word) for word in words if "${" in word)
        return f"{error.full_key}: {lines[0]}{f' ({references})' if references else ''}"
    return " ".join(dict.fromkeys(lines)) or type(error).__name__


def choices_of(group: str, command: str) -> list[str]:
    """List the choices of a group. Choices of `experiment` may lie in subfolders: papers/luong_2015_table_4."""
    folder = config_dir() / group
    paths = folder.rglob("[!_]*.yaml") if group == RECIPES else folder.glob("[!_]*.yaml")
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)
    return [name for name in names if (group, name, command) != ("search", "as_trained", "train")]


@cache
def known_keys(command: str) -> list[str]:
    """List all keys, sections and groups of a command, including those of choices that are not selected."""
    files = _config_files(command)
    keys = [key for path in files for key in _keys_of(path)]
    sections = {key.rpartition(".")[0] for key in keys}
    groups = {_group(path.parent) for path in files}
    return sorted({*keys, *sections, *groups} - {"", "."})  # "": section of a key at the top; ".": group of its file


def _config_files(command: str) -> list[Path]:
    """List all YAML files of a command, including choices that are not selected."""
    roots = sorted(config_dir().iterdir()) if command == "train" else []
    roots += [config_dir() / "search"] if command in {"evaluate", "translate", "serve"} else []
    return [config_dir() / f"{command}.yaml", *(path for root in roots for path in sorted(root.rglob("*.yaml")))]


def _group(folder: Path) -> str:
    group = folder.relative_to(config_dir()).as_posix()
    return RECIPES if group.startswith(f"{RECIPES}/") else group


@cache
def _keys_of(path: Path) -> list[str]:
    """List the dotted keys that a file sets, such as attention.score.dim."""
    text = path.read_text(encoding="utf-8")
    parts = path.parent.relative_to(config_dir()).parts
    prefix = "" if "@package _global_" in text else ".".join([*parts, ""])
    values = {str(key): value for key, value in (yaml.safe_load(text) or {}).items() if key not in NO_KEYS}
    return [key for key, _ in flatten(values, prefix)]


NO_KEYS = {"defaults", "hydra", "_target_"}  # entries of YAML files that users do not override


def _unknown_key(match: re.Match[str], command: str, words: Words) -> str:
    key, keys = match[1], known_keys(command)
    inner = [name for word in words if word.startswith(f"{key}={{") for name in re.findall(r"[{,]\s*(\w+)\s*:", word)]
    if wrong := [f"{key}.{name}" for name in inner if f"{key}.{name}" not in keys]:
        key = wrong[0]
    if "/" in key and key in keys:
        section, _, part = key.partition("/")
        return f"{key}: the chosen {section} has no {part}; choose another {section}"
    if key in keys:
        choices = _choices_with(key)
        available = f"; available with {', '.join(choices)}" if choices else ""
        return f"{key}: not a key of the chosen {key.rpartition('.')[0]}{available}"
    candidates = [name for name in keys if not name.startswith("size.")]  # other keys take their values from them
    candidates += ["hydra.run.dir"] if command == "train" else []
    return f"{key}: unknown key{nearest(key, candidates)} (nmt-{command} --help lists all)"


def _choices_with(key: str) -> list[str]:
    """Return the choices, as GROUP=CHOICE, whose files define the key or section."""
    return [
        f"{_group(path.parent)}={path.stem}"
        for path in _config_files("train")[1:]
        if path.stem in choices_of(_group(path.parent), "train")
        and not path.is_relative_to(config_dir() / RECIPES)
        and any(f"{name}.".startswith(f"{key}.") for name in _keys_of(path))
    ]


def _unknown_choice(match: re.Match[str], command: str, words: Words) -> str | None:
    path = match[1]
    arguments = (word.lstrip("+").partition("=")[::2] for word in words)
    group, _, choice = path.rpartition("/")
    # encoder/gru is choice gru of group encoder, unless an argument shows that the choice itself has a slash.
    group, choice = next((pair for pair in arguments if "/".join(pair) == path), (group, choice))
    listed = match.string.partition("Available options in")[2].partition("Config search path:")[0].split()[1:]
    others = [name for name in listed if not (config_dir() / group / f"{name}.yaml").exists() and name[0] != "_"]
    choices = [*choices_of(group, command), *others]
    return f"{group}={choice}: not one of {', '.join(choices)}{nearest(choice, choices)}" if choices else None


# Patterns in the messages of Hydra and OmegaConf, and functions that word the explanation from the match.
EXPLANATIONS: dict[str, Callable[[re.Match[str], str, Words], str | None]] = {
    r"hydra_plugins\.hydra_(\w+)_launcher": lambda m, *_: (
        f"hydra/launcher: {m[1]} is not installed: pip install hydra-{m[1]}-launcher"
    ),
    "^Could not override '(.*?)'": _unknown_key,
    "Interpolation key 'size\\.": lambda *_: (
        "size=auto is resolved from the corpus when training starts; set size=small, base or large to see its values"
    ),
    r"invalid literal for int\(\) with base 10: '(.*)'": lambda m, *_: (
        f"{m[1]}: a key within a list, which has no keys; set the whole list, as in logger=[tensorboard]"
    ),
    "INTERVAL_SWEEP": lambda *_: "interval(a,b) is for a search: add hydra/sweeper=optuna",
    r"Could not (?:find|load) '([^'\n]*)'": _unknown_choice,
}
