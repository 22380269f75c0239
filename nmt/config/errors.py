"""What a user can cause, told in one line."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input or the configuration: shown as one line, exit status 2, no traceback."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest allowed word, or an empty string."""
    close = difflib.get_close_matches(given, [word for word in allowed if word != given], n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
