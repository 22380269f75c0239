"""Notebooks: the text versions run, and the .ipynb files have the same cells with the output of a run."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from documents import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
MARKER = re.compile(r"^# %%(?: \[(markdown)\])?\n", re.M)
SECONDS = 900  # limit per cell; the longest takes two minutes on two idle cores

Cell = tuple[str, str]  # (kind, text)


def cells_of_text(path: Path) -> list[Cell]:
    """Read the cells of a text version in the format py:percent: Markdown lines start with "# "."""
    _, *parts = MARKER.split(path.read_text(encoding="utf-8"))
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(kind or "code", re.sub(r"^# ?", "", text, flags=re.M) if kind else text) for kind, text in pairs]


def cells_of_notebook(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_holds_the_cells_of_its_text(path: Path) -> None:
    cells = cells_of_notebook(path.with_suffix(".ipynb"))
    held = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert held == [(kind, text.strip("\n")) for kind, text in cells_of_text(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_holds_the_output_of_one_run(path: Path) -> None:
    """Cells ran once from top to bottom without errors; the file is small and names no personal folders, and it can be
    read where no widgets are shown."""
    notebook = path.with_suffix(".ipynb")
    code = [cell for cell in cells_of_notebook(notebook) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert not [
        output for cell in code for output in cell["outputs"] if output.get("name") == "stderr"
    ]  # progress bars
    assert "jupyter.widget-view" not in notebook.read_text(encoding="utf-8")
    assert notebook.stat().st_size < 500_000
    assert not re.search(r"/(?:home|Users|root|tmp)/", notebook.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_from_the_repository(path: Path) -> None:
    address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    kind, text = cells_of_text(path)[0]
    assert kind == "code"
    assert f"git+{address}" in text
    assert all(line.startswith("#") for line in text.split("\n") if line)


def test_training_from_scratch_has_the_code_of_the_example() -> None:
    """The lines of each function of the example, and of its `main`, stand in the notebook in the same order."""
    example = (ROOT / "examples" / "train_by_hand.py").read_text(encoding="utf-8").partition("\nif __name__")[0]
    cells = cells_of_text(ROOT / "docs" / "notebooks" / "train_from_scratch.py")
    lines = [line.strip() for kind, text in cells if kind == "code" for line in text.splitlines()]
    _, *functions = re.split(r"^def \w+", example, flags=re.M)
    assert len(functions) == 3
    for function in functions:
        held = iter(lines)
        body = [line.strip() for line in function.splitlines()[1:] if line.strip()]
        assert [line for line in body if line not in held] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_text_runs(path: Path, tmp_path: Path) -> None:
    jupytext = pytest.importorskip("jupytext", reason="the extra `notebooks` is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
    notebook = jupytext.read(path)
    folder = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=folder).execute()
