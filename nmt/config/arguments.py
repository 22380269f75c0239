"""Command-line arguments: overrides such as "optimizer.lr=0.1", and paths with ~."""

import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.config.errors import UserError

_KEYWORDS: dict[str, bool | None] = {"": None, "null": None, "true": True, "false": False}


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """The values that overrides set, by key; lists and mappings stay text."""
    values = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        values[key] = _parse_scalar(text)
    return values


def _parse_scalar(text: str) -> str | int | float | bool | None:
    """Parse as Hydra does; YAML 1.1 differs in `yes`, 0x10 and 1e-05."""
    if text.lower() in _KEYWORDS:
        return _KEYWORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def quoted(value: object) -> str:
    """Quote a string, such as a path, where Hydra would otherwise misread it."""
    text = str(value)
    if re.fullmatch(r"[a-zA-Z_/][\w./-]*", text, re.ASCII) and isinstance(_parse_scalar(text), str):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


def for_shell(key: str, value: object) -> str:
    """KEY=VALUE for a string or a list of strings, quoted for both Hydra and a shell."""
    text = f"[{','.join(map(quoted, value))}]" if isinstance(value, list) else quoted(value)
    argument = f"{key}={text}"
    double_quotes_suffice = "'" in argument and not set(argument) & set('"$`\\!')
    return f'"{argument}"' if double_quotes_suffice else shlex.quote(argument)


def user_path(path: Path | str) -> Path:
    """Expand a leading ~. Raises UserError if the home directory is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: no home directory is known for ~ (HOME is not set); give an absolute path, for prepared corpora "
            "in NMT_CACHE"
        ) from None
