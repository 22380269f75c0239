"""Overrides in messages to users: a shell and Hydra read them as the intended values."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from nmt.config.errors import for_shell, format_value, quoted

STRANGE = [
    "/tmp/ä/x",
    "my run (2)",
    "a=b",
    "it's",
    'say "x"',
    "a#b",
    "a&b",
    "a,b",
    "[a]",
    "a\\",
    "a\\'b",
    "~/x",
    "true",
]


@pytest.mark.parametrize("text", [*STRANGE, "outputs/run-1/2.0_x"])
def test_hydra_reads_back_what_a_shell_hands_on(text: str) -> None:
    (word,) = shlex.split(for_shell("run", text))
    assert OverridesParser.create().parse_override(word).value() == text


def test_a_list_too() -> None:
    (word,) = shlex.split(for_shell("run", STRANGE))
    assert OverridesParser.create().parse_override(word).value() == STRANGE


def test_what_needs_no_quotes_has_none() -> None:
    assert for_shell("run", "outputs/run-1/2.0_x") == "run=outputs/run-1/2.0_x"
    assert for_shell("run", "my run") == "\"run='my run'\""
    assert quoted("null") == "'null'"


def test_a_value_in_a_message_cannot_control_the_terminal() -> None:
    assert format_value("a\x1b[31mb\n") == r"a\x1b[31mb\n"
