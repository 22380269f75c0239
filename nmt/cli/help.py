"""The text of --help, and one-line explanations of errors, from the YAML files in configs/."""

import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nmt.config.compose import config_dir, flatten
from nmt.config.errors import UserError, format_value, nearest, nearest_key

COLUMN, WIDTH = 28, 128  # column in which a comment starts, and length of the longest line
MAX_LINE = 60  # characters; the comment of a longer line starts below it
RECIPES = "experiment"  # subfolders of this group hold choices; a subfolder of any other group is a group
# Keys that size=auto sets from the corpus, and the keys that override them.
SET_BY_SIZE = {"size.lr": "optimizer.lr", "size.vocab_size": "tokenizer.vocab_size"}


def config_files(command: str) -> list[tuple[Path, str]]:
    """List all YAML files of a command with the prefix of their keys, including choices that are not selected."""
    roots = [config_dir() / command, *(sorted(config_dir().iterdir()) if command == "train" else [])]
    roots += [config_dir() / "search"] if command in {"evaluate", "translate", "serve"} else []
    files = [(config_dir() / f"{command}.yaml", "")]
    for root in (root for root in roots if root.is_dir() and root.name != "hydra"):
        files += [(path, key_prefix(path)) for path in sorted(root.rglob("*.yaml"))]
    return files


def key_prefix(path: Path) -> str:
    """Return the prefix of the keys in a group's file, such as "attention.score."."""
    is_global = "@package _global_" in path.read_text(encoding="utf-8")
    return "" if is_global else ".".join([*path.parent.relative_to(config_dir()).parts, ""])


def choices_of(group: str, command: str) -> list[str]:
    """List the choices of a group. Choices of `experiment` may lie in subfolders: papers/luong_2015_table_4."""
    folder = config_dir() / group
    paths = folder.rglob("[!_]*.yaml") if group == RECIPES else folder.glob("[!_]*.yaml")
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in paths)
    return [name for name in names if (group, name, command) != ("search", "as_trained", "train")]


def known_keys(command: str) -> list[str]:
    """List all keys, sections and groups of a command, including those of choices that are not selected."""
    files = config_files(command)
    keys = [key for path, prefix in files for key in _keys_of(path, prefix)]
    sections = {key.rpartition(".")[0] for key in keys}
    groups = {_group(path.parent) for path, _ in files}
    return sorted({*keys, *sections, *groups} - {"", "."})


def _group(folder: Path) -> str:
    group = folder.relative_to(config_dir()).as_posix()
    return RECIPES if group.startswith(f"{RECIPES}/") else group


def _keys_of(path: Path, prefix: str) -> list[str]:
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    job = {str(key): value for key, value in values.items() if key not in {"defaults", "hydra"}}
    return [key for key, _ in flatten(job, prefix)]


def all_choices() -> str:
    """List the choices of each group of nmt-train, one line for a group, for --help; an OmegaConf resolver."""
    folders = sorted(path for path in config_dir().rglob("*") if path.is_dir())
    groups = [_group(folder) for folder in folders]
    choices = {group: choices_of(group, "train") for group in groups if group.partition("/")[0] != "hydra"}
    return "\n".join(f"{group}: {', '.join(names)}" for group, names in choices.items() if names)


def values(*, _root_: DictConfig) -> str:
    """Format the composed values as YAML with comments, for --help; an OmegaConf resolver.

    `$` is doubled, because Hydra reads the result as a template. OmegaConf passes the whole configuration as `_root_`.
    """
    job = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    text = OmegaConf.to_yaml(job, resolve="--resolve" in sys.argv)
    comments = _comments(str(_root_.hydra.job.name), dict(_root_.hydra.runtime.choices))
    lines = text.splitlines()
    for name, key, _ in _nodes(text):
        if comment := comments.get(name):
            line = lines[key.start_mark.line]
            parts = textwrap.wrap(comment, WIDTH - COLUMN - 2, break_on_hyphens=False)
            block = [f"{'':{COLUMN}}# {part}" for part in parts]
            first = f"{line:{COLUMN - 1}} {block.pop(0).strip()}" if len(line) < MAX_LINE else line
            lines[key.start_mark.line] = "\n".join([first, *block])
    return "\n".join(lines).replace("$", "$$")


def _comments(command: str, choices: dict[str, str]) -> dict[str, str]:
    """Collect the comment of each key.

    If several files comment a key, the command's own file takes precedence, then that of the selected choice.
    """
    comments: dict[str, str] = {}
    for path, prefix in config_files(command):
        comments |= _comments_in(path, prefix, above=False)  # a comment above a key may describe another choice
    for key, choice in choices.items():
        group, _, package = key.partition("@")
        path = config_dir() / group / f"{choice}.yaml"
        if path.is_file() and not group.startswith("hydra/"):
            comments |= _comments_in(path, f"{package}." if package else key_prefix(path), above=True)
    return comments | _comments_in(config_dir() / f"{command}.yaml", "", above=True)


def _comments_in(path: Path, prefix: str, above: bool) -> dict[str, str]:
    """Collect the comments in one file: comments beside values and, if `above`, comments above keys."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    comments = {}
    for name, key, value in _nodes(text):
        end = key.end_mark if isinstance(value, yaml.MappingNode) else value.end_mark
        rest = lines[end.line][end.column :].lstrip(": ")
        block = []
        if rest.startswith("#"):
            block = [rest, *_comment_lines(lines[end.line + 1 :], lines[end.line].index(rest, end.column))]
        elif above:
            before = _comment_lines(lines[: key.start_mark.line][::-1], key.start_mark.column)
            block = [line for line in reversed(before) if "@package" not in line]
        if block:
            comments[f"{prefix}{name}"] = " ".join(line.strip().removeprefix("#").strip() for line in block)
    return comments


def _comment_lines(lines: list[str], column: int) -> list[str]:
    """Return the comment lines at the start of `lines` whose # stands in this column."""
    return [*takewhile(lambda line: line.startswith(f"{'':{column}}#"), lines)]


def _nodes(text: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield the full key, key node and value node of each key in YAML text."""

    def walk(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
            yield f"{prefix}{key.value}", key, value
            yield from walk(value, f"{prefix}{key.value}.")

    return walk(yaml.compose(text, yaml.SafeLoader), "")


def explain(error: Exception, command: str) -> str:
    """Explain an error to the user: one line for each problem, with the key and the nearest valid name."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See http")]
    text = lines[0] if lines else type(error).__name__
    for pattern, explanation in EXPLANATIONS.items():
        # Hydra may put the message of a UserError below its own, and lists choices below "Available options in ...".
        if match := re.search(pattern, "\n".join(lines), re.MULTILINE):
            if message := explanation(match, command):
                return message
            break
    match error:
        case MissingMandatoryValue():
            return f"{error.full_key}: missing; give it as {error.full_key}=..."
        case OmegaConfBaseException(full_key=str(key)) if key:
            references = [format_value(word) for word in sys.argv[1:] if "${" in word]
            return f"{key}: {text}{f' ({chr(32).join(references)})' if references else ''}"
    return " ".join(dict.fromkeys(lines)) or text


def _not_in_utf8(reason: str) -> str:
    """Name the YAML file, in a folder that an argument names, that is not UTF-8 text."""
    folders = [Path(part) for word in sys.argv[1:] for part in re.split(r"[=,'\[\]]", word) if part]
    file = "a file of the configuration"
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*.yaml"))):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            file = str(path)
            break
    return f"{file}: is not UTF-8 text ({reason}); save it as UTF-8"


def _user_error(match: re.Match[str], _: str) -> str:
    return match[1] or match[2]


def _missing_launcher(match: re.Match[str], _: str) -> str:
    return f"hydra/launcher: {match[1]} is not installed: pip install hydra-{match[1]}-launcher"


def _key_in_list(match: re.Match[str], _: str) -> str:
    return f"{match[1]}: a key within a list, which has no keys; set the whole list, as in logger=[tensorboard]"


def _unknown_key(match: re.Match[str], command: str) -> str:
    key = match[1]
    if key.startswith("hydra."):
        return f"{key}: unknown key{_keys_beside(key)}"
    keys = known_keys(command)
    if key in SET_BY_SIZE:
        return f"{key}: size=auto sets this from the corpus; override {SET_BY_SIZE[key]} instead"
    if wrong := [f"{key}.{name}" for name in _keys_of_value(key) if f"{key}.{name}" not in keys]:
        key = wrong[0]
    if "/" in key and key in keys:
        section, _, part = key.partition("/")
        return f"{key}: the chosen {section} has no {part}; choose another {section}"
    if key in keys:
        choices = _choices_with(key, command)
        available = f"; available with {', '.join(choices)}" if choices else ""
        return f"{key}: not a key of the chosen {key.partition('.')[0]}{available}"
    candidates = [name for name in keys if name not in SET_BY_SIZE]
    candidates += ["hydra.run.dir"] if command == "train" else []
    return f"{key}: unknown key{nearest_key(key, candidates)} (nmt-{command} --help lists all)"


def _keys_beside(key: str) -> str:
    """Return the end of a message: the nearest key of the chosen launcher or sweeper, and all its keys."""
    group = "/".join(key.split(".")[:2])
    chosen = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"{group}=")]
    path = config_dir() / group / f"{chosen[-1] if chosen else ''}.yaml"
    if not path.is_file():
        return "; keys of a launcher or sweeper need hydra/launcher=... or hydra/sweeper=..."
    prefix = key_prefix(path)
    keys = [name.removeprefix(prefix) for name in _keys_of(path, prefix) if not name.endswith("._target_")]
    return f"{nearest(key.removeprefix(prefix), keys)} ({group}={chosen[-1]} has: {', '.join(keys)})"


def _keys_of_value(key: str) -> list[str]:
    """Return the keys of the dictionary that an argument gives to a section, as in training={max_epochs:3}."""
    values = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith(f"{key}={{")]
    return re.findall(r"[{,]\s*(\w+)\s*:", values[-1]) if values else []


def _choices_with(key: str, command: str) -> list[str]:
    """Return the choices, as GROUP=CHOICE, whose files define the key or section."""
    return [
        f"{_group(path.parent)}={path.stem}"
        for path, prefix in config_files(command)
        if prefix and path.stem in choices_of(_group(path.parent), "train")
        if any(f"{name}.".startswith(f"{key}.") for name in _keys_of(path, prefix))
    ]


def _several_values(match: re.Match[str], command: str) -> str:
    key, _, values = match[1].partition("=")
    return f"{match[1]}: for a list give '{key}=[{values}]'{'; for a sweep add -m' if command == 'train' else ''}"


def _unresolved_size(*_: object) -> str:
    return "size=auto is resolved from the corpus when training starts; set size=small, base or large to see its values"


def _unknown_choice(match: re.Match[str], command: str) -> str | None:
    path = match[1]
    arguments = (word.lstrip("+").partition("=")[::2] for word in sys.argv[1:])
    group, _, choice = path.rpartition("/")
    # encoder/gru is choice gru of group encoder, unless an argument shows that the choice itself has a slash.
    group, choice = next((pair for pair in arguments if "/".join(pair) == path), (group, choice))
    listed = match.string.partition("Available options in")[2].partition("Config search path:")[0].split()[1:]
    others = [name for name in listed if not (config_dir() / group / f"{name}.yaml").exists() and name[0] != "_"]
    choices = [*choices_of(group, command), *others]
    return f"{group}={choice}: not one of {', '.join(choices)}{nearest(choice, choices)}" if choices else None


# Patterns in the messages of Hydra and OmegaConf, and functions that word the explanation from the match.
EXPLANATIONS: dict[str, Callable[[re.Match[str], str], str | None]] = {
    r"UserError raised while resolving interpolation: (.*)|UserError\(['\"](.*)['\"]\)$": _user_error,
    r"hydra_plugins\.hydra_(\w+)_launcher": _missing_launcher,
    "^Could not override '(.*?)'": _unknown_key,
    "^Ambiguous value for argument '(.*?)'": _several_values,
    "codec can't decode byte .*: (.*)$": lambda match, _: _not_in_utf8(match[1]),
    "Interpolation key 'size\\.": _unresolved_size,
    r"invalid literal for int\(\) with base 10: '(.*)'": _key_in_list,
    "INTERVAL_SWEEP": lambda *_: "interval(a,b) is for a search: add hydra/sweeper=optuna",
    r"Could not (?:find|load) '([^'\n]*)'": _unknown_choice,
}
