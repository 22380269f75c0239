"""The YAML files in configs/ that a command reads: their groups, choices and keys, and --help, which prints them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from nmt.config.checks import config_dir, flatten

RECIPES = "experiment"  # subfolders of this group hold choices; a subfolder of any other group is a group
NO_KEYS = {"defaults", "hydra", "_target_"}  # entries of YAML files that users do not override
GRAMMAR = """\
# {command} KEY=VALUE sets one value of the files below; GROUP=CHOICE takes a group's values from another file, which
# {command} --help GROUP=CHOICE shows. Options: --cfg job [--resolve] prints the composed configuration,
# --config-dir FOLDER adds a folder of your own recipes, --version{more}.
"""
MORE = """;
# --dry-run checks all and tells how long the run would take, -m runs all combinations of several values,
# -sc install=bash|zsh|fish installs completion"""


@cache
def group_files(command: str) -> dict[tuple[str, str], Path]:
    """Map each group and choice of a command, such as ("attention/score", "dot"), to the choice's file."""
    files = {}
    for path in sorted(config_dir().rglob("*/*.yaml")):
        group, _, choice = path.relative_to(config_dir()).with_suffix("").as_posix().rpartition("/")
        if group.startswith(f"{RECIPES}/"):  # papers/luong_2015_table_4 is a choice of experiment
            group, choice = RECIPES, f"{group.removeprefix(f'{RECIPES}/')}/{choice}"
        searches = group == "search" and command in {"evaluate", "translate", "serve"}
        if searches or (command == "train" and (group, choice) != ("search", "as_trained")):
            files[group, choice] = path
    return files


def choices_of(group: str, command: str) -> list[str]:
    """List the choices of a group, but not the files that only serve as defaults of others, such as _apart.yaml."""
    return [choice for owner, choice in group_files(command) if owner == group and not choice.startswith("_")]


@cache
def known_keys(command: str) -> list[str]:
    """List all keys, sections and groups of a command, including those of choices that are not selected."""
    files = group_files(command)
    keys = [key for path in (config_dir() / f"{command}.yaml", *files.values()) for key in keys_in(path)]
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    return sorted({*keys, *sections, *(group for group, _ in files)})


@cache
def keys_in(path: Path) -> list[str]:
    """List the dotted keys that a file sets, such as attention.score.dim."""
    text = path.read_text(encoding="utf-8")
    parts = path.parent.relative_to(config_dir()).parts
    prefix = "" if "@package _global_" in text else ".".join([*parts, ""])
    values = {str(key): value for key, value in (yaml.safe_load(text) or {}).items() if key not in NO_KEYS}
    return [key for key, _ in flatten(values, prefix)]


def choices_with(key: str) -> list[str]:
    """List the choices of nmt-train, as GROUP=CHOICE, whose files set this key or a key of this section."""
    return [
        f"{group}={choice}"
        for (group, choice), path in group_files("train").items()
        if group != RECIPES and choice[0] != "_" and any(f"{name}.".startswith(f"{key}.") for name in keys_in(path))
    ]


def help_text(command: str, chosen: Mapping[str, object]) -> str:
    """Return the command's file, the files of the selected choices, and a list of all choices.

    chosen: overrides by key, such as {"attention": "luong_dot"}.
    """
    text, files = (config_dir() / f"{command}.yaml").read_text(encoding="utf-8"), group_files(command)
    defaults = [entry for entry in yaml.safe_load(text).get("defaults", []) if isinstance(entry, dict)]
    selected = {**{group: choice for entry in defaults for group, choice in entry.items()}, **chosen}
    shown = [
        f"# ===== {group}={choice} =====\n{files[group, choice].read_text(encoding='utf-8')}"
        for group, choice in selected.items()
        if (group, choice) in files
    ]
    grammar = GRAMMAR.format(command=f"nmt-{command}", more=MORE if command == "train" else "")
    groups = sorted({group for group, _ in files})
    listed = [f"# {group}: {', '.join(choices_of(group, command))}\n" for group in groups]
    return "\n".join([grammar, text, *shown, "".join(["# ===== Choices =====\n", *listed])])
