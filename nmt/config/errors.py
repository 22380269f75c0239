"""What a user can cause, told in one line."""

import difflib
import re
from collections.abc import Iterable

LONGEST = 100  # characters of a value in a message
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # with bytes that are not UTF-8, as Python holds them


class UserError(ValueError):
    """A mistake in the input or the configuration: shown as one line, exit status 2, no traceback."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest allowed word, or an empty string."""
    close = difflib.get_close_matches(given[:LONGEST], [word for word in allowed if word != given], n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def shown(value: object, longest: int = LONGEST) -> str:
    """As a user would write it, in one line that a terminal can show; of a long one its two ends."""
    if value is None:
        return "null"
    try:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "an integer of thousands of digits"
    if len(text) > longest:
        half = longest // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable(text: str) -> str:
    """Control characters, which a terminal would obey, and lone surrogates, which UTF-8 lacks, as escapes."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
