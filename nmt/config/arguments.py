"""Command-line arguments: overrides such as "optimizer.lr=0.1", and paths with ~."""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError

_WORDS: dict[str, bool | None] = {"": None, "null": None, "true": True, "false": False}


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """What overrides set, as plain values by key; lists and the like as they are written."""
    values = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        values[key] = _plain(text)
    return values


def _plain(text: str) -> str | int | float | bool | None:
    """As Hydra reads it, which does not share YAML 1.1's ideas of `yes`, 0x10 or 1e-05."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def quoted(value: object) -> str:
    """A string, such as a path, as Hydra reads it back, whatever signs are in it."""
    text = str(value)
    if re.fullmatch(r"[a-zA-Z_/][\w./-]*", text, re.ASCII) and isinstance(_plain(text), str):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


def for_shell(key: str, value: object) -> str:
    """KEY=VALUE, of a string or a list of strings, as a user can give it to a command."""
    text = f"[{','.join(map(quoted, value))}]" if isinstance(value, list) else quoted(value)
    word = f"{key}={text}"
    readable = "'" in word and not set(word) & set('"$`\\!')
    return f'"{word}"' if readable else shlex.quote(word)


def user_path(path: Path | str) -> Path:
    """The path with the home directory for a leading ~. Raises UserError where there is no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: no home directory is known for ~ (HOME is not set); give the whole path, for prepared corpora in "
            "NMT_CACHE"
        ) from None
