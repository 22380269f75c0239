"""Overrides such as "optimizer.lr=0.1": their values, how they are quoted for a shell, and paths in them."""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError

_WORDS: dict[str, bool | None] = {"": None, "null": None, "true": True, "false": False}


def override_values(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the plain values of overrides by key; lists and dictionaries remain text."""
    values = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        values[key] = plain_value(text)
    return values


def plain_value(text: str) -> str | int | float | bool | None:
    """Read a value as Hydra does, which differs from YAML 1.1 in `yes`, 0x10 and 1e-05."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def quoted(value: object) -> str:
    """Quote a string, such as a path, for Hydra's grammar if it needs quotes."""
    text = str(value)
    if re.fullmatch(r"[a-zA-Z_/][\w./-]*", text, re.ASCII) and isinstance(plain_value(text), str):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def for_shell(key: str, value: object) -> str:
    """Write KEY=VALUE for a string or a list of strings, quoted so that a user can paste it into a shell."""
    text = f"[{','.join(map(quoted, value))}]" if isinstance(value, list) else quoted(value)
    word = f"{key}={text}"
    readable = "'" in word and not set(word) & set('"$`\\!')
    return f'"{word}"' if readable else shlex.quote(word)


def user_path(path: Path | str) -> Path:
    """Expand a leading ~ or ~USER of a path. Raises UserError if there is no such home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = str(path).partition("/")[0].removeprefix("~")
        problem = f"there is no user {user}" if user else "~ has no meaning without a home directory (HOME is not set)"
        raise UserError(f"{path}: {problem}; give an absolute path, for prepared corpora in NMT_CACHE") from None
