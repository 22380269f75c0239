"""The pictures of the documentation: presets are trained as a sweep, then drawn."""

from pathlib import Path

import pytest
from conftest import TINY, script
from forks import call_text


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("presets", [["none", "luong_dot"], ["gnmt"]], ids=",".join)
def test_each_preset_has_a_picture(presets: list[str], tmp_path: Path) -> None:
    words = ["sweep", "pictures", *TINY, "training.max_steps=2", "--presets", *presets]
    done = call_text(script("draw_presets").__file__, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert set(pictures) == {f"{name}.png" for name in presets} | ({"length.png"} if len(presets) > 1 else set())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
