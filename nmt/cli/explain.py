"""What to tell of an error: one line, with the key, and the nearest thing that exists."""

import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nmt.config.compose import config_dir, flatten
from nmt.config.errors import UserError, format_value, nearest, nearest_key
from nmt.run import ERROR

# What size=auto takes from the size that it finds, and where a user gives it instead.
SETTLED = {"size.lr": "optimizer.lr", "size.vocab_size": "tokenizer.vocab_size"}


def explain(error: Exception, command: str) -> str:
    """What to tell of an error: our own as it is, the system's, Hydra's or OmegaConf's in one line."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _explain(error, command)


def record_failure(directory: Path, message: str, overrides: Sequence[str]) -> None:
    """error.txt: why a job of a sweep failed, in one line; what it was started with, in another; and what led to it."""
    line = "; ".join(message.splitlines())
    with suppress(OSError):  # the disk may be full
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ERROR).write_text(f"{line}\n{shlex.join(overrides)}\n\n{traceback.format_exc()}", encoding="utf-8")


def _explain(error: Exception, command: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See http")]
    text = lines[0] if lines else type(error).__name__
    if known := _known_fault(text, command):
        return known
    match error:
        case MissingMandatoryValue():
            return f"{error.full_key}: missing; give it as {error.full_key}=..."
        case OmegaConfBaseException(full_key=str(key)) if key:
            referring = [format_value(word) for word in sys.argv[1:] if "${" in word]
            return f"{key}: {text}{f' ({chr(32).join(referring)})' if referring else ''}"
    return " ".join(dict.fromkeys(lines)) or text


def _known_fault(text: str, command: str) -> str | None:
    """What Hydra says at length, in our words."""
    for pattern, tell in FAULTS.items():
        if found := re.search(pattern, text):
            return tell(found, command)
    return None


def _not_installed(found: re.Match[str], command: str) -> str:
    extra = {"joblib": "parallel", "submitit": "slurm"}[found[1]]
    return f'hydra/launcher: {found[1]} is not installed: pip install "nmt[{extra}]"'


def _no_such_choice(found: re.Match[str], command: str) -> str | None:
    group, choice = _chosen(found[1])
    choices = choices_of(group, command) + (["basic"] if group.startswith("hydra/") else [])
    return f"{group}={choice}: not one of {', '.join(choices)}{nearest(choice, choices)}" if choices else None


def _several_values(found: re.Match[str], command: str) -> str:
    key, _, values = found[1].partition("=")
    return f"{found[1]}: for a list give '{key}=[{values}]'{'; for a sweep add -m' if command == 'train' else ''}"


FAULTS: dict[str, Callable[[re.Match[str], str], str | None]] = {
    r"UserError raised while resolving interpolation: (.*)|UserError\(['\"](.*)['\"]\)$": lambda found, _: (
        found[1] or found[2]
    ),
    r"hydra_plugins\.hydra_(\w+)_launcher": _not_installed,
    "^Could not override '(.*?)'": lambda found, command: _unknown(found[1], command),
    "^Ambiguous value for argument '(.*?)'": _several_values,
    "Interpolation key 'size\\.": lambda *_: (
        "size=auto: the corpus chooses, when the run begins; give size=small, base or large to see its values"
    ),
    "INTERVAL_SWEEP": lambda *_: "interval(a,b) is for a search: add hydra/sweeper=optuna",
    r"Could not find '.*?([^']*)'[^']*$": _no_such_choice,
}


def choices_of(group: str, command: str) -> list[str]:
    """What a user may choose from a group."""
    names = sorted(path.stem for path in (config_dir() / group).glob("[!_]*.yaml"))
    return [name for name in names if (group, name, command) != ("search", "as_trained", "train")]


def _chosen(path: str) -> tuple[str, str]:
    """encoder/gru -> encoder, gru; a choice may hold slashes too."""
    words = (word.lstrip("+").partition("=")[::2] for word in sys.argv[1:])
    given = ((group, choice) for group, choice in words if f"{group}/{choice}" == path)
    group, _, choice = path.rpartition("/")
    return next(given, (group, choice))


def _unknown(key: str, command: str) -> str:
    if key.startswith("hydra."):
        return (
            f"{key}: unknown key; those of a launcher or sweeper need hydra/launcher=... or hydra/sweeper=... as well"
        )
    known = known_keys(command)
    if key in SETTLED:
        return f"{key}: the corpus chooses the size here; give {SETTLED[key]}"
    if key in known:
        chosen = _choices_with(key, command)
        such = f", such as {', '.join(chosen)}" if chosen else ""
        return f"{key}: is no value of the {key.partition('.')[0]} that is chosen here, but of another choice{such}"
    own = [each for each in known if each not in SETTLED] + (["hydra.run.dir"] if command == "train" else [])
    return f"{key}: unknown key{nearest_key(key, own)} (nmt-{command} --help lists all)"


def _choices_with(key: str, command: str) -> list[str]:
    """The choices of the key's own groups whose files have it, as words of the command line."""
    choices = []
    for path, package in config_files(command):
        group = path.parent.relative_to(config_dir()).as_posix()
        if package and path.stem in choices_of(group, "train"):
            keys = (f"{name}." for name, _ in flatten(_values(path), package))
            choices += [f"{group}={path.stem}"] if any(name.startswith(f"{key}.") for name in keys) else []
    return choices


def config_files(command: str) -> list[tuple[Path, str]]:
    """The YAML files of a command, those of choices that are not chosen too, with what comes before their keys."""
    roots = [config_dir() / command, *(sorted(config_dir().iterdir()) if command == "train" else [])]
    roots += [config_dir() / "search"] if command in {"evaluate", "translate"} else []
    files = [(config_dir() / f"{command}.yaml", "")]
    for root in (root for root in roots if root.is_dir() and root.name != "hydra"):
        files += [(path, package_of(path)) for path in sorted(root.rglob("*.yaml"))]
    return files


def package_of(path: Path) -> str:
    """What comes before the keys of a group's file: "attention.score."."""
    is_global = "@package _global_" in path.read_text(encoding="utf-8")
    return "" if is_global else ".".join([*path.parent.relative_to(config_dir()).parts, ""])


def known_keys(command: str) -> list[str]:
    """Keys, sections and groups of the command, those of choices that are not chosen too."""
    files = config_files(command)
    keys = []
    for path, package in files:
        keys += [key for key, _ in flatten(_values(path), package)]
    sections = {key.rpartition(".")[0] for key in keys}
    groups = {path.parent.relative_to(config_dir()).as_posix() for path, _ in files}
    return sorted({*keys, *sections, *groups} - {"", "."})


def _values(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return {str(key): value for key, value in values.items() if key not in {"defaults", "hydra"}}
