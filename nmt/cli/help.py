"""What --help, --version and --cfg print: the YAML files in configs/ as they stand, versions, composed values."""

from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from nmt import DISTRIBUTION
from nmt.cli.compose import composed, explained, lines, parsed
from nmt.cli.explain import RECIPES, choices_of
from nmt.config.compose import config_dir

GRAMMAR = """\
# {command} KEY=VALUE sets one value of the files below; GROUP=CHOICE takes a group's values from another file, which
# {command} --help GROUP=CHOICE shows. Options: --cfg job [--resolve] prints the composed configuration,
# --config-dir FOLDER adds a folder of your own recipes, --version{more}.
"""
MORE = """;
# --dry-run checks all and tells how long the run would take, -m runs all combinations of several values,
# -sc install=bash|zsh|fish installs completion"""


def information(command: str, options: Namespace) -> str | None:
    """Return the text that --version, --help or --cfg asks for; None if no option asks for a text."""
    if options.version:
        return f"nmt {version(DISTRIBUTION)} (Hydra {version('hydra-core')})\n"
    overrides = parsed(options.overrides, command) if options.help or options.cfg else []
    if options.help:
        return help_text(command, {str(each.key_or_group): str(each.value()) for each in overrides})
    if options.cfg:
        words = lines(overrides)
        config = composed(command, words)
        without_hydra = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        with explained(command, words):  # an interpolation may fail to resolve
            return OmegaConf.to_yaml(without_hydra, resolve=options.resolve)
    return None


def help_text(command: str, named: dict[str, str]) -> str:
    """Return the command's file, the files of the selected choices, and a list of all choices.

    named: overrides by key.
    """
    path, files = config_dir() / f"{command}.yaml", []
    for group, choice in (_defaults(path) | named).items():
        file = config_dir() / group / f"{choice}.yaml"
        if (config_dir() / group).is_dir() and file.is_file():
            files.append(f"# ===== {group}={choice} =====\n{file.read_text(encoding='utf-8')}")
    grammar = GRAMMAR.format(command=f"nmt-{command}", more=MORE if command == "train" else "")
    listed = [f"# {group}: {', '.join(choices_of(group, command))}\n" for group in groups(command)]
    return "\n".join([grammar, path.read_text(encoding="utf-8"), *files, "".join(["# ===== Choices =====\n", *listed])])


def groups(command: str) -> list[str]:
    """List the groups of a command, such as attention/score."""
    if command != "train":
        return [group for group in _defaults(config_dir() / f"{command}.yaml") if "/" not in group]
    folders = sorted(path for path in config_dir().rglob("*") if path.is_dir())
    names = [folder.relative_to(config_dir()).as_posix() for folder in folders]
    return [name for name in names if name != "hydra" and not name.startswith(f"{RECIPES}/")]


def _defaults(path: Path) -> dict[str, str]:
    entries = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", [])
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {str(group): str(choice) for group, choice in pairs if not str(group).startswith("override ")}
