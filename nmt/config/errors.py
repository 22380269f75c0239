"""One-line errors with a suggestion for the user, and the syntax of overrides such as "optimizer.lr=0.1"."""

import difflib
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_VALUE = 100  # characters of a value shown in a message; a longer value is cut
MAX_SUGGESTIONS = 4  # if more words match, the message suggests none
# Words that Hydra reads as something else than text.
_WORDS: dict[str, bool | None] = {"": None, "null": None, "true": True, "false": False}
# Control characters, and the lone surrogates by which Python represents bytes of a command line that are not UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class UserError(ValueError):
    """A mistake in the input or the configuration: printed as one line without a traceback; exit status 2."""


def nearest(key: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a word that is not allowed, such as an unknown key, or "" if no word is near or
    more than MAX_SUGGESTIONS are.

    A key without a section (`lr`) suggests the keys of all sections that end in this name (`optimizer.lr`), but only
    those with the fewest sections. A key with a section (`optimiser.lr`) suggests, of the keys that end in the same
    name, the closest spelling, or all if none is close. Any other word suggests the closest spelling.
    """
    candidates = [candidate for candidate in allowed if candidate != key]
    key = key[:MAX_VALUE].lower()
    same_name = [candidate for candidate in candidates if candidate.rpartition(".")[2] == key.rpartition(".")[2]]
    closest = difflib.get_close_matches(key, same_name or candidates, n=1, cutoff=0.6)
    near = closest if not same_name or ("." in key and closest) else same_name
    depth = min((candidate.count(".") for candidate in near), default=0)
    words = [f"'{candidate}'" for candidate in near if candidate.count(".") == depth]
    return f"; did you mean {' or '.join(words)}?" if 0 < len(words) <= MAX_SUGGESTIONS else ""


def format_value(value: object, longest: int = MAX_VALUE) -> str:
    """Return the value as a user would write it, in one printable line; a long value is cut in the middle."""
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if len(text) > longest:
        half = longest // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Escape control characters, which a terminal would interpret, and lone surrogates, which UTF-8 cannot encode."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def override_values(overrides: Iterable[str]) -> dict[str, Any]:
    """Parse overrides KEY=VALUE into a dictionary; lists and dictionaries remain text."""
    values = {}
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        values[key] = plain_value(text)
    return values


def plain_value(text: str) -> str | int | float | bool | None:
    """Parse a value as Hydra does, except that an empty value is None. YAML 1.1 would give other results for `yes`,
    0x10 and 1e-05."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def quoted(value: object) -> str:
    """Write a string, such as a path, for Hydra's grammar, with quotes if it needs them."""
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
        hint = "give an absolute path, for prepared corpora in NMT_CACHE"
        raise UserError(f"{path}: there is no such home directory; {hint}") from None
