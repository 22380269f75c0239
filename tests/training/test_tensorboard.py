import errno
import html
import io
import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray

from nmt.training.journal import TensorBoard, literal


def read(directory: Path, tag: str) -> list[tuple[int, np.ndarray]]:
    """(step, values) of everything that TensorBoard shows of a tag, read by TensorBoard's own loader."""
    events = EventAccumulator(str(directory)).Reload().Tensors(tag)
    return [(event.step, make_ndarray(event.tensor_proto)) for event in events]


def curve(directory: Path, tag: str = "train/loss") -> list[tuple[int, float]]:
    return [(step, float(value)) for step, value in read(directory, tag)]


def texts(directory: Path, tag: str) -> list[tuple[int, str]]:
    return [(step, value.item().decode()) for step, value in read(directory, f"{tag}/text_summary")]


@pytest.fixture(autouse=True)
def sortable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in the order of their names; within a second a counter decides, here of equal width."""
    writer = "tensorboard.summary.writer.event_file_writer"
    monkeypatch.setattr(f"{writer}._global_uid", SimpleNamespace(get=itertools.count(1000).__next__))


def test_scalars(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, resume_step=None) as board:
        for step in range(5):
            board.scalars(step, {"train/loss": 1 / (step + 1), "train/rate": step})
    assert curve(tmp_path) == [(step, pytest.approx(1 / (step + 1))) for step in range(5)]
    assert curve(tmp_path, "train/rate") == [(step, step) for step in range(5)]


def test_a_histogram_counts_each_whole_number(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, resume_step=None) as board:
        board.histogram("jumps", np.array([-1, 0, 0, 2]), 3)
        board.histogram("nothing", np.zeros(0, np.int64), 3)
    ((step, bins),) = read(tmp_path, "jumps")
    assert step == 3
    # TensorBoard cuts the outermost bins at the smallest and greatest value.
    assert [bin for bin in bins.tolist() if bin[2]] == [[-1, -0.5, 1], [-0.5, 0.5, 2], [1.5, 2, 1]]
    assert "nothing" not in EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]


def write(directory: Path, resume_step: int | None, steps: range, value: float) -> None:
    with TensorBoard(directory, resume_step) as board:
        for step in steps:
            board.scalars(step, {"train/loss": value})
            board.text("note", f"{value}", step)
            board.image("picture", np.zeros((1, 1, 3), np.uint8), step)


def test_resuming_supersedes_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, None, range(10), value=1)
    write(tmp_path, 5, range(6, 8), value=2)  # not as far as the first run: its steps 8 and 9 go too
    values = [*[(step, 1) for step in range(6)], (6, 2), (7, 2)]
    assert curve(tmp_path) == values
    assert texts(tmp_path, "note") == [(step, f"{value}") for step, value in values]
    assert [step for step, _ in read(tmp_path, "picture")] == list(range(8))
    write(tmp_path, 6, range(7, 9), value=3)
    assert curve(tmp_path) == [*values[:7], (7, 3), (8, 3)]


def test_a_new_run_supersedes_everything(tmp_path: Path) -> None:
    write(tmp_path, None, range(4), value=1)
    write(tmp_path, None, range(2), value=2)
    assert curve(tmp_path) == [(0, 2), (1, 2)]


def test_flush_brings_points_to_the_disk(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, resume_step=None)
    board.scalars(1, {"train/loss": 3})
    board.flush()
    assert curve(tmp_path) == [(1, 3)]
    board.close()


def test_leaving_the_block_closes_even_on_error(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, resume_step=None)

    def interrupted() -> None:
        with board:
            board.scalars(1, {"train/loss": 3})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert curve(tmp_path) == [(1, 3)]
    board.close()


def test_image_keeps_its_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 7, 3), dtype=np.uint8)
    with TensorBoard(tmp_path, resume_step=None) as board:
        board.image("attention/1", pixels, 3)
    ((step, (width, height, png)),) = read(tmp_path, "attention/1")
    assert (step, height, width) == (3, b"4", b"7")
    np.testing.assert_array_equal((imread(io.BytesIO(png)) * 255).round(), pixels)


def test_text_stays_markdown(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, resume_step=None) as board:
        board.text("config", "**bold**", 0)
    assert texts(tmp_path, "config") == [(0, "**bold**")]


def page(directory: Path, tag: str) -> list[list[str]]:
    """The table that TensorBoard shows, cell by cell, as a reader sees it."""
    ((_, markdown),) = texts(directory, tag)
    rows = re.findall(r"<tr>(.*?)</tr>", markdown_to_safe_html(markdown), re.DOTALL)
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    assert not any("<" in cell for row in cells for cell in row)  # no markup was made of a text
    return [[html.unescape(cell) for cell in row] for row in cells]


SAMPLES = [
    ("<s> a | b </s>", "*x* _y_ `z`", "[link](http://a.b) <script>alert(1)</script>"),
    ("# no heading", "- no list", "1. \\| & &amp; &#42; http://a.b"),
    ("", "---", "![picture](x.png)"),
    ("two\nlines", "tab\there", "une zone économique « européenne » 東京"),
]


def test_samples_are_shown_literally(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, resume_step=None) as board:
        board.samples("samples", SAMPLES, 2)
    shown = [[" ".join(cell.split()) for cell in row] for row in SAMPLES]
    assert page(tmp_path, "samples") == [["source", "reference", "hypothesis"], *shown]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20))
def test_no_text_breaks_the_page(text: str) -> None:
    rendered = markdown_to_safe_html(f"| a | b |\n| --- | --- |\n| {literal(text)} | end |")
    cells = re.findall(r"<td>(.*?)</td>", rendered, re.DOTALL)
    assert [html.unescape(cell) for cell in cells] == [" ".join(text.split()), "end"]


def test_a_full_disk_is_an_error_with_the_folder_and_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    board = TensorBoard(tmp_path, None)
    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        _write_until_it_fails(board)
    assert error.value.filename == str(tmp_path)
    assert capsys.readouterr().err == ""


def _write_until_it_fails(board: TensorBoard) -> None:
    for step in range(100):
        board.scalars(step, {"loss": 1.0})
        time.sleep(0.01)  # the writing thread comes first
