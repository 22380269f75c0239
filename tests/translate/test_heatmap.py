import warnings
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from nmt.translate import heatmap
from nmt.translate.heatmap import MARKS, draw_alignment, to_array, token_labels


def words(count: int) -> list[str]:
    return [f"▁word{n}" for n in range(count - 1)] + ["</s>"]


def draw(targets: int, sources: int) -> Figure:
    weights = np.random.default_rng(0).dirichlet(np.ones(sources), size=targets)
    return draw_alignment(weights, words(sources), words(targets))


def labels(figure: Figure) -> tuple[list[Text], list[Text]]:
    """Return the labels of the columns, above the matrix, and of the rows, on its left."""
    axes = figure.axes[0]
    return [t.label2 for t in axes.xaxis.get_major_ticks()], [t.label1 for t in axes.yaxis.get_major_ticks()]


def texts_of(figure: Figure) -> list[list[str]]:
    return [[label.get_text() for label in side] for side in labels(figure)]


def matrix_box(figure: Figure) -> Bbox:
    """Return the matrix's rectangle in pixels, counted from the lower left."""
    figure.draw_without_rendering()
    return figure.axes[0].get_window_extent()


def test_cells_show_their_weights() -> None:
    weights = np.array([[0.0, 0.2, 0.8], [0.5, 0.25, 0.25]])
    figure = draw_alignment(weights, ["a", "b", "</s>"], ["c", "</s>"])
    pixels, box = to_array(figure), matrix_box(figure)
    colours = matplotlib.colormaps["viridis"]
    for (row, column), weight in np.ndenumerate(weights):
        for inside in (0.2, 0.5, 0.8):  # three points of a cell have its colour
            y = pixels.shape[0] - box.y1 + (row + inside) * box.height / 2
            x = box.x0 + (column + inside) * box.width / 3
            assert pixels[int(y), int(x)] == pytest.approx(np.array(colours(weight)[:3]) * 255, abs=3)


def test_rows_are_targets_with_labels_on_top() -> None:
    figure = draw_alignment(np.eye(2, 3), ["▁a", "▁b", "</s>"], ["▁c", "</s>"])
    assert texts_of(figure) == [["a", "b", "</s>"], ["c", "</s>"]]
    box = matrix_box(figure)
    columns, rows = ([label.get_window_extent() for label in side] for side in labels(figure))
    assert all(label.y0 >= box.y1 for label in columns)
    assert [label.y1 for label in rows] == sorted((label.y1 for label in rows), reverse=True)
    assert all(label.x1 <= box.x0 for label in rows)
    assert len(figure.axes[0].get_xticklabels()) + len(figure.axes[0].get_yticklabels()) == 5  # one for each token


@pytest.mark.parametrize(("targets", "sources"), [(1, 1), (2, 40), (100, 20)])
def test_cells_are_square_and_nothing_is_cut_off(targets: int, sources: int) -> None:
    figure = draw(targets, sources)
    box = matrix_box(figure)
    assert box.width / sources == pytest.approx(box.height / targets)
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert 0 <= drawn.x0 < drawn.x1 <= width
    assert 0 <= drawn.y0 < drawn.y1 <= height
    assert to_array(figure).shape == (*(int(side) for side in (figure.bbox.height, figure.bbox.width)), 3)


@pytest.mark.parametrize("count", [3, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 175, 250, 350))])
def test_labels_are_legible_and_never_touch(count: int) -> None:
    figure = draw(count, count)
    figure.draw_without_rendering()
    pixels_per_point = figure.dpi / 72
    columns, rows = labels(figure)
    boxes = [label.get_window_extent() for label in rows]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))
    places = [label.get_transform().transform(label.get_position())[0] for label in columns]
    slanted = np.diff(places).min() * np.sin(np.radians(columns[0].get_rotation()))
    assert slanted >= columns[0].get_fontsize() * pixels_per_point
    (size,) = {label.get_fontsize() for label in (*rows, *columns)}
    assert (8.9 if count <= 175 else 6.4) < size < 10
    if count <= 250:
        assert len(rows) == len(columns) == count


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (["▁agree", "ment", "▁on", "</s>"], ["agree", "•ment", "on", "</s>"]),
        (["▁agree", "▁", "d", "</s>"], ["agree", "␣", "•d", "</s>"]),
        (["▁", "i", "j", "▁", "e", "\u0301", "</s>"], ["␣", "i", "j", "␣", "e", "◌\u0301", "</s>"]),
        (["▁", "\u1112", "\u1161", "\u11ab", "\u11b0"], ["␣", "ㅎ", "ㅏ", "ㄴ", "ㄺ"]),
        (["whole", "words", "</s>"], ["whole", "words", "</s>"]),
        (["▁a\nb\t", "\x00\u2028", "</s>"], ["a\\nb\\t", "•\\x00\\u2028", "</s>"]),
        (["▁" + "x" * 99], ["x" * 23 + "…"]),
        (["▁הכ", "לב", ".", "▁12", "▁a", "</s>"], ["הכ", "•לב", "•.\u200f", "12\u200f", "a", "</s>"]),
        (["▁a", ".", "▁הכלב", "."], ["a", "•.", "הכלב", "•."]),
    ],
)
def test_token_labels(tokens: list[str], shown: list[str]) -> None:
    assert token_labels(tokens) == shown


@pytest.mark.parametrize(
    ("source", "notes"), [(["▁a", "b"], [MARKS["•"]]), (["▁a", "▁b"], []), (["▁", "b"], [MARKS["␣"]])]
)
def test_the_mark_is_explained_where_it_occurs(source: list[str], notes: list[str]) -> None:
    texts = draw_alignment(np.eye(2), source, ["▁c", "▁d"]).axes[0].texts
    assert [text.get_text() for text in texts] == notes


def test_only_letters_stand_upright() -> None:
    for column, angle in (("e\u0301", 0), ("עע", 0), ("▁agree", 60)):
        figure = draw_alignment(np.eye(2, 3), [column, "▁", "</s>"], ["▁c", "</s>"])
        assert {label.get_rotation() for label in labels(figure)[0]} == {angle}, column


def test_dollars_are_no_formula() -> None:
    tokens = ["$x_1^2$", r"$\frac$"]
    figure = draw_alignment(np.eye(2), tokens, tokens, title=r"$\frac$")
    to_array(figure)  # would raise a parse error if $ started a formula
    assert not any(text.get_parse_math() for text in figure.findobj(Text) if "$" in text.get_text())
    assert texts_of(figure) == [tokens, tokens]


def test_characters_without_a_font_are_boxes_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heatmap, "_installed_fonts", lambda: [])
    monkeypatch.setattr(heatmap, "_fonts_of", heatmap._fonts_of.__wrapped__)
    heatmap._warn_of_boxes.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            drawn = to_array(draw_alignment(np.eye(2), ["▁東京", "▁नमस्ते"], ["▁한국", "▁\U0001f916"]))
    assert drawn.any()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install fonts, e.g. fonts-noto-core and fonts-noto-cjk" in caplog.text
