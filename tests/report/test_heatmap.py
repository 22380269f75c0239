import os
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from nmt.report.heatmap import draw_alignment, save, to_array, token_labels


def words(count: int) -> list[str]:
    return [f"▁word{n}" for n in range(count - 1)] + ["</s>"]


def draw(targets: int, sources: int) -> Figure:
    weights = np.random.default_rng(0).dirichlet(np.ones(sources), size=targets)
    return draw_alignment(weights, words(sources), words(targets))


def labels(figure: Figure) -> tuple[list[str], list[str]]:
    axes = figure.axes[0]
    return [label.get_text() for label in axes.get_xticklabels()], [
        label.get_text() for label in axes.get_yticklabels()
    ]


def matrix_box(figure: Figure) -> Bbox:
    """The matrix's place in pixels, counted from the lower left."""
    figure.draw_without_rendering()
    return figure.axes[0].get_window_extent()


def test_cells_show_their_weights() -> None:
    weights = np.array([[0.0, 0.2, 0.8], [0.5, 0.25, 0.25]])
    figure = draw_alignment(weights, ["a", "b", "</s>"], ["c", "</s>"])
    pixels, box = to_array(figure), matrix_box(figure)
    colours = matplotlib.colormaps["viridis"]
    for (row, column), weight in np.ndenumerate(weights):
        for inside in (0.2, 0.5, 0.8):  # the whole cell has one colour
            y = pixels.shape[0] - box.y1 + (row + inside) * box.height / 2
            x = box.x0 + (column + inside) * box.width / 3
            assert pixels[int(y), int(x)] == pytest.approx(np.array(colours(weight)[:3]) * 255, abs=3)


def test_rows_are_targets_with_labels_on_top() -> None:
    figure = draw_alignment(np.eye(2, 3), ["▁a", "▁b", "</s>"], ["▁c", "</s>"])
    assert labels(figure) == (["a", "b", "</s>"], ["c", "</s>"])
    box = matrix_box(figure)
    axes = figure.axes[0]
    assert all(label.get_window_extent().y0 >= box.y1 for label in axes.get_xticklabels())
    tops = [label.get_window_extent().y1 for label in axes.get_yticklabels()]
    assert tops == sorted(tops, reverse=True)
    assert all(label.get_window_extent().x1 <= box.x0 for label in axes.get_yticklabels())


@pytest.mark.parametrize(("targets", "sources"), [(1, 1), (3, 2), (2, 40), (60, 60), (150, 20), (250, 250)])
def test_cells_are_square_and_nothing_is_cut_off(targets: int, sources: int) -> None:
    figure = draw(targets, sources)
    box = matrix_box(figure)
    assert box.width / sources == pytest.approx(box.height / targets)
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert drawn.x0 >= 0
    assert drawn.y0 >= 0
    assert drawn.x1 <= width
    assert drawn.y1 <= height
    assert to_array(figure).shape == (*(int(side) for side in (figure.bbox.height, figure.bbox.width)), 3)


def test_size_grows_and_is_capped() -> None:
    sizes = [max(to_array(draw(count, count)).shape) for count in (5, 20, 60)]
    assert sizes == sorted(set(sizes))
    assert max(to_array(draw(250, 250)).shape) < 2400


@pytest.mark.parametrize("count", [3, 20, 60, 120, 250])
def test_labels_are_legible_and_never_touch(count: int) -> None:
    figure = draw(count, count)
    figure.draw_without_rendering()
    pixels_per_point = figure.dpi / 72
    rows = figure.axes[0].get_yticklabels()
    boxes = [label.get_window_extent() for label in rows]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))
    columns = figure.axes[0].get_xticklabels()
    places = [label.get_transform().transform(label.get_position())[0] for label in columns]
    slanted = np.diff(places).min() * np.sin(np.radians(columns[0].get_rotation()))
    assert slanted >= columns[0].get_fontsize() * pixels_per_point
    assert min(label.get_fontsize() for label in (*rows, *columns)) >= 6.5
    if count <= 120:
        assert len(rows) == len(columns) == count


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (["▁agree", "ment", "▁on", "</s>"], ["agree", "•ment", "on", "</s>"]),
        (["▁", "ab", "c", "</s>"], ["␣", "•ab", "•c", "</s>"]),
        (["agree", "ment", "▁on"], ["agree", "•ment", "on"]),
        (["whole", "words", "</s>"], ["whole", "words", "</s>"]),
        (["▁a\nb\t", "\x00\u2028", "</s>"], ["a\\nb\\t", "•\\x00\\u2028", "</s>"]),
        (["▁" + "x" * 99], ["x" * 23 + "…"]),
        (["▁भारत", "▁Россия"], ["भारत", "Россия"]),
    ],
)
def test_token_labels(tokens: list[str], shown: list[str]) -> None:
    assert token_labels(tokens) == shown


def notes(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_mark_is_explained_where_it_occurs() -> None:
    weights = np.eye(2)
    assert notes(draw_alignment(weights, ["▁a", "b"], ["▁c", "▁d"])) == ["• continues the word before"]
    assert notes(draw_alignment(weights, ["▁a", "▁b"], ["▁c", "▁d"])) == []


def test_dollars_are_no_formula() -> None:
    tokens = ["$x_1^2$", r"$\frac$"]
    figure = draw_alignment(np.eye(2), tokens, tokens, title=r"$\frac$")
    to_array(figure)  # mathtext would raise a parse error
    assert not any(text.get_parse_math() for text in figure.findobj(Text) if "$" in text.get_text())
    assert labels(figure) == (tokens, tokens)


def test_title_is_shown() -> None:
    titled = draw_alignment(np.eye(2), ["a", "b"], ["c", "d"], title="step 7\n")
    assert titled.axes[0].get_title(loc="left") == "step 7\\n"


def test_scripts_without_a_font_make_no_noise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = to_array(draw_alignment(np.eye(2), ["▁東京", "▁नमस्ते"], ["▁한국", "▁\U0001f600"]))
    assert drawn.any()


def test_scale_is_fixed() -> None:
    faint = draw_alignment(np.full((2, 2), 0.1), ["a", "b"], ["c", "d"])
    assert faint.axes[0].images[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("shape", "sources", "targets"), [((2, 3), 2, 3), ((2, 3), 2, 2), ((2, 3), 3, 1), ((0, 3), 3, 0)]
)
def test_labels_must_match_the_matrix(shape: tuple[int, int], sources: int, targets: int) -> None:
    with pytest.raises(ValueError, match=f"for {targets} target and {sources} source tokens"):
        draw_alignment(np.zeros(shape), ["x"] * sources, ["x"] * targets)


def test_saved_picture_is_the_drawn_one(tmp_path: Path) -> None:
    figure = draw(4, 5)
    save(figure, tmp_path / "picture.png")
    pixels = to_array(figure)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal((imread(tmp_path / "picture.png")[..., :3] * 255).round(), pixels)


def test_pyplot_stays_away() -> None:
    code = "import sys, nmt.report.heatmap; sys.exit('matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "MPLBACKEND": "agg"})
