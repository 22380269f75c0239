"""The site builds without warnings about links, anchors or references, and loads nothing from a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import PRESETS, ROOT

for module in ("mkdocs", "material", "latex2mathml"):
    pytest.importorskip(module, reason="the extra `docs` is not installed")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_formulae_are_mathml(site: Path) -> None:
    for name in PRESETS:
        text = (site / "attention" / f"{name}.html").read_text(encoding="utf-8")
        assert '<div class="formula"><math' in text
        assert "arithmatex" not in text
        assert f'src="images/{name}.png"' in text


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* href="https?:', text) == [], page


def test_an_unknown_command_of_latex_is_an_error() -> None:
    sys.path.append(str(ROOT / "docs" / "hooks"))
    import mathematics

    assert mathematics.to_mathml(r"\mathrm{softmax}(e_t)", "inline").count("<mi>softmax</mi>") == 1
    with pytest.raises(ValueError, match=r"unknown LaTeX command \\nosuchthing"):
        mathematics.to_mathml(r"x + \nosuchthing", "inline")
