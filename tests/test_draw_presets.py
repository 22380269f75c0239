"""The pictures of the documentation: presets are trained as a sweep, then drawn."""

from pathlib import Path

import pytest
from conftest import TINY
from forks import call_text

SCRIPT = Path(__file__).parents[1] / "scripts" / "draw_presets.py"


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("presets", [["none", "luong_dot"], ["gnmt"]], ids=",".join)
def test_each_preset_has_a_picture(presets: list[str], tmp_path: Path) -> None:
    words = [*TINY, "training.max_steps=2", "--presets", *presets]
    done = call_text(SCRIPT, "sweep", "pictures", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pictures = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert pictures == {f"{name}.png" for name in presets} | ({"length.png"} if len(presets) > 1 else set())
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "pictures").iterdir())


def test_an_unknown_preset_is_refused(tmp_path: Path) -> None:
    done = call_text(SCRIPT, "sweep", "pictures", "--presets", "nobody", cwd=tmp_path)
    assert done.returncode == 2
    assert "invalid choice: 'nobody'" in done.stderr
    assert not list(tmp_path.iterdir())
