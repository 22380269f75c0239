"""What --help, --version and --cfg print: the YAML files in configs/ as they stand, versions, composed values."""

from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from nmt import DISTRIBUTION
from nmt.cli.compose import composed, explained, value_of
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
    if options.help:
        return help_text(command, options.overrides)
    if options.cfg:
        config = composed(command, options.overrides)
        job = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        with explained(command, options.overrides):
            return OmegaConf.to_yaml(job, resolve=options.resolve)
    return None


def help_text(command: str, overrides: list[str]) -> str:
    """Return the command's file, the files of the selected choices, and a list of all choices."""
    parts = [GRAMMAR.format(command=f"nmt-{command}", more=MORE if command == "train" else "")]
    parts += [path.read_text(encoding="utf-8") for path in (config_dir() / f"{command}.yaml",)]
    for group, choice in _selected(command, overrides).items():
        file = config_dir() / group / f"{choice}.yaml"
        if file.is_file():
            parts.append(f"# ===== {group}={choice} =====\n{file.read_text(encoding='utf-8')}")
    listed = [f"# {group}: {', '.join(choices_of(group, command))}\n" for group in groups(command)]
    return "\n".join([*parts, "".join(["# ===== Choices =====\n", *listed])])


def groups(command: str) -> Iterator[str]:
    """Yield the groups of a command, such as attention/score."""
    if command != "train":
        yield from (group for group in _defaults(config_dir() / f"{command}.yaml") if "/" not in group)
        return
    for folder in sorted(path for path in config_dir().rglob("*") if path.is_dir()):
        group = folder.relative_to(config_dir()).as_posix()
        if not group.startswith(("hydra", f"{RECIPES}/")) or group in {"hydra/launcher", "hydra/sweeper"}:
            yield group


def _selected(command: str, overrides: list[str]) -> dict[str, str]:
    """Return the choice of each group: those of the command's file, and those that the overrides name."""
    named = {word.partition("=")[0].lstrip("+"): value_of(word) for word in overrides}
    return _defaults(config_dir() / f"{command}.yaml") | {
        key: value for key, value in named.items() if (config_dir() / key).is_dir()
    }


def _defaults(path: Path) -> dict[str, str]:
    entries = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", [])
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {str(group): str(choice) for group, choice in pairs if not str(group).startswith("override ")}
