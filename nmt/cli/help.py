"""What --help shows: the choices of each group, and the composed values with their comments from configs/."""

import sys
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from nmt.cli.explain import choices_of, config_files, package_of
from nmt.config.compose import config_dir

COLUMN, WIDTH = 28, 128  # where comments begin, and where lines end
LONGEST = 60  # characters of a line beside which a comment begins; that of a longer one begins below


def all_choices() -> str:
    """A line for each group of nmt-train."""
    folders = sorted(path for path in config_dir().rglob("*") if path.is_dir())
    groups = [folder.relative_to(config_dir()).as_posix() for folder in folders]
    shown = {group: choices_of(group, "train") for group in groups if group.partition("/")[0] != "hydra"}
    return "\n".join(f"{group}: {', '.join(choices)}" for group, choices in shown.items() if choices)


def values(*, _root_: DictConfig) -> str:
    """The composed values as YAML with comments, `$` doubled: Hydra substitutes in what it returns.

    OmegaConf calls it as a resolver, with the whole configuration as `_root_`.
    """
    job = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    text = OmegaConf.to_yaml(job, resolve="--resolve" in sys.argv)
    comments = _comments(str(_root_.hydra.job.name), dict(_root_.hydra.runtime.choices))
    lines = text.splitlines()
    for name, key, _ in _keys(text):
        if comment := comments.get(name):
            line = lines[key.start_mark.line]
            parts = textwrap.wrap(comment, WIDTH - COLUMN - 2, break_on_hyphens=False)
            block = [f"{'':{COLUMN}}# {part}" for part in parts]
            beside = f"{line:{COLUMN - 1}} {block.pop(0).strip()}" if len(line) < LONGEST else line
            lines[key.start_mark.line] = "\n".join([beside, *block])
    return "\n".join(lines).replace("$", "$$")


def _comments(command: str, choices: dict[str, str]) -> dict[str, str]:
    """What the files of a command say of their keys; what a chosen one says counts."""
    found: dict[str, str] = {}
    for path, package in config_files(command):
        found |= _comments_in(path, package, above=False)  # what stands above may describe another choice
    for key, choice in choices.items():
        group, _, package = key.partition("@")
        path = config_dir() / group / f"{choice}.yaml"
        if path.is_file() and not group.startswith("hydra/"):
            found |= _comments_in(path, f"{package}." if package else package_of(path), above=True)
    return found | _comments_in(config_dir() / f"{command}.yaml", "", above=True)


def _comments_in(path: Path, package: str, above: bool) -> dict[str, str]:
    """The comments of one file: beside values and, if `above`, also above their keys."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    comments = {}
    for name, key, value in _keys(text):
        end = key.end_mark if isinstance(value, yaml.MappingNode) else value.end_mark
        rest = lines[end.line][end.column :].lstrip(": ")
        block = []
        if rest.startswith("#"):
            block = [rest, *_comment_lines(lines[end.line + 1 :], lines[end.line].index(rest, end.column))]
        elif above:
            before = _comment_lines(lines[: key.start_mark.line][::-1], key.start_mark.column)
            block = [line for line in reversed(before) if "@package" not in line]
        if block:
            comments[f"{package}{name}"] = " ".join(line.strip().removeprefix("#").strip() for line in block)
    return comments


def _comment_lines(lines: list[str], column: int) -> list[str]:
    """The first lines, as far as they hold nothing but a comment that begins in this column."""
    return [*takewhile(lambda line: line.startswith(f"{'':{column}}#"), lines)]


def _keys(text: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """The keys of YAML text with their sections, and where they and their values stand."""

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
            yield f"{prefix}{key.value}", key, value
            yield from walk(value, f"{prefix}{key.value}.")

    return walk(yaml.compose(text, yaml.SafeLoader), "")
