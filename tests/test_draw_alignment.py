"""Drawing a sentence: what is missing is one line, before any work."""

from pathlib import Path

import pytest
from forks import call_text

SCRIPT = Path(__file__).parents[1] / "scripts" / "draw_alignment.py"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("here.png", "error: run=nowhere: no such directory\n"),
        ("nowhere/here.png", "error: nowhere/here.png: must be a file in an existing folder\n"),
        (".", "error: .: must be a file in an existing folder\n"),
    ],
)
def test_a_mistake_is_one_line(output: str, message: str, tmp_path: Path) -> None:
    done = call_text(SCRIPT, "nowhere", "the dog", output, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(message)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
