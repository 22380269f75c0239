"""What to tell of an error: one line, with the key, and the nearest thing that exists."""

import re
import sys

import yaml
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nmt.config.compose import config_dir, flatten
from nmt.config.errors import UserError, nearest, shown


def explain(error: Exception, command: str) -> str:
    """What to tell of an error: our own as it is, the system's, Hydra's or OmegaConf's in one line."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _explain(error, command)


def _explain(error: Exception, command: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See http")]
    text = lines[0] if lines else type(error).__name__
    if known := _known_fault(text, command):
        return known
    match error:
        case MissingMandatoryValue():
            return f"{error.full_key}: missing; give it as {error.full_key}=..."
        case OmegaConfBaseException(full_key=str(key)) if key:
            referring = [shown(word) for word in sys.argv[1:] if "${" in word]
            return f"{key}: {text}{f' ({chr(32).join(referring)})' if referring else ''}"
    return " ".join(dict.fromkeys(lines)) or text


def _known_fault(text: str, command: str) -> str | None:
    """What Hydra says at length, in our words."""
    if ours := re.search(r"UserError raised while resolving interpolation: (.*)|UserError\(['\"](.*)['\"]\)$", text):
        return ours[1] or ours[2]
    if plugin := re.search(r"hydra_plugins\.hydra_(\w+)_launcher", text):
        extra = {"joblib": "parallel", "submitit": "slurm"}[plugin[1]]
        return f'hydra/launcher: {plugin[1]} is not installed: pip install "nmt[{extra}]"'
    if text.startswith("Could not override '"):
        return _unknown(text.split("'")[1], command)
    if "INTERVAL_SWEEP" in text:
        return "interval(a,b) is for a search: add hydra/sweeper=optuna"
    if "Could not find '" in text:
        group, choice = _chosen(text.split("'")[-2])
        choices = sorted(path.stem for path in (config_dir() / group).glob("[!_]*.yaml"))
        choices += ["basic"] if group.startswith("hydra/") else []
        if choices:
            return f"{group}={choice}: not one of {', '.join(choices)}{nearest(choice, choices)}"
    return None


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
    if key in known:
        return f"{key}: is no value of the {key.partition('.')[0]} that is chosen here, but of another choice"
    return f"{key}: unknown key{nearest(key, known)} (nmt-{command} --cfg job lists all)"


def known_keys(command: str) -> list[str]:
    """Keys, sections and groups of the command, those of choices that are not chosen too."""
    roots = [config_dir() / command, *([config_dir() / "search"] if command != "train" else config_dir().iterdir())]
    files = [(config_dir() / f"{command}.yaml", "")]
    groups = []
    for root in (root for root in roots if root.is_dir() and root.name != "hydra"):
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            group = folder.relative_to(config_dir()).as_posix()
            groups.append(group)
            files += [(path, f"{group.replace('/', '.')}.") for path in folder.glob("*.yaml")]
    keys = []
    for path, package in files:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text) or {}
        skipped = {"defaults", "hydra"}
        plain = {str(key): value for key, value in values.items() if key not in skipped}
        keys += [key for key, _ in flatten(plain, "" if "@package _global_" in text else package)]
    sections = {key.rpartition(".")[0] for key in keys}
    return sorted({*keys, *sections, *groups} - {""})
