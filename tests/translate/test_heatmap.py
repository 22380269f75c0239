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

from nmt.translate import heatmap
from nmt.translate.heatmap import MARKS, draw_alignment, fonts_of, save, to_array, token_labels


def words(count: int) -> list[str]:
    return [f"▁word{n}" for n in range(count - 1)] + ["</s>"]


def draw(targets: int, sources: int) -> Figure:
    weights = np.random.default_rng(0).dirichlet(np.ones(sources), size=targets)
    return draw_alignment(weights, words(sources), words(targets))


def row_labels(figure: Figure) -> list[Text]:
    """Return the labels on the left of the matrix."""
    return [tick.label1 for tick in figure.axes[0].yaxis.get_major_ticks()]


def column_labels(figure: Figure) -> list[Text]:
    """Return the labels above the matrix."""
    return [tick.label2 for tick in figure.axes[0].xaxis.get_major_ticks()]


def labels(figure: Figure) -> tuple[list[str], list[str]]:
    """Return the texts of the columns' and of the rows' labels."""
    return [each.get_text() for each in column_labels(figure)], [each.get_text() for each in row_labels(figure)]


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
    assert labels(figure) == (["a", "b", "</s>"], ["c", "</s>"])
    box = matrix_box(figure)
    assert all(label.get_window_extent().y0 >= box.y1 for label in column_labels(figure))
    tops = [label.get_window_extent().y1 for label in row_labels(figure)]
    assert tops == sorted(tops, reverse=True)
    assert all(label.get_window_extent().x1 <= box.x0 for label in row_labels(figure))
    assert len(figure.axes[0].get_xticklabels()) + len(figure.axes[0].get_yticklabels()) == 5  # one for each token


@pytest.mark.parametrize(("targets", "sources"), [(1, 1), (2, 40), (100, 20)])
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


@pytest.mark.parametrize("count", [3, 40, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 175, 250, 350))])
def test_labels_are_legible_and_never_touch(count: int) -> None:
    figure = draw(count, count)
    figure.draw_without_rendering()
    pixels_per_point = figure.dpi / 72
    rows, columns = row_labels(figure), column_labels(figure)
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
        (["▁", "ab", "c", "</s>"], ["␣", "ab", "c", "</s>"]),
        (["▁", "i", "j", "▁", "e", "\u0301", "</s>"], ["␣", "i", "j", "␣", "e", "◌\u0301", "</s>"]),
        (["▁", "\u1112", "\u1161", "\u11ab", "\u11b0"], ["␣", "ㅎ", "ㅏ", "ㄴ", "ㄺ"]),
        (["agree", "ment", "▁on"], ["agree", "•ment", "on"]),
        (["whole", "words", "</s>"], ["whole", "words", "</s>"]),
        (["▁a\nb\t", "\x00\u2028", "</s>"], ["a\\nb\\t", "•\\x00\\u2028", "</s>"]),
        (["▁" + "x" * 99], ["x" * 23 + "…"]),
        (["▁भारत", "▁Россия"], ["भारत", "Россия"]),
        (["▁הכ", "לב", ".", "▁12", "▁a", "</s>"], ["הכ", "•לב", "•.\u200f", "12\u200f", "a", "</s>"]),
        (["▁a", ".", "▁הכלב", "."], ["a", "•.", "הכלב", "•."]),
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
    assert notes(draw_alignment(weights, ["▁", "b"], ["▁c", "▁d"])) == [MARKS["␣"]]


def test_only_letters_stand_upright() -> None:
    for column, angle in (("e\u0301", 0), ("עע", 0), ("▁agree", 60)):
        figure = draw_alignment(np.eye(2, 3), [column, "▁", "</s>"], ["▁c", "</s>"])
        assert {label.get_rotation() for label in column_labels(figure)} == {angle}, column


def test_dollars_are_no_formula() -> None:
    tokens = ["$x_1^2$", r"$\frac$"]
    figure = draw_alignment(np.eye(2), tokens, tokens, title=r"$\frac$")
    to_array(figure)  # would raise a parse error if $ started a formula
    assert not any(text.get_parse_math() for text in figure.findobj(Text) if "$" in text.get_text())
    assert labels(figure) == (tokens, tokens)


def test_characters_without_a_font_are_boxes_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heatmap, "_installed_fonts", lambda: [])
    heatmap._fonts_of.cache_clear()
    heatmap._warn_of_boxes.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            drawn = to_array(draw_alignment(np.eye(2), ["▁東京", "▁नमस्ते"], ["▁한국", "▁\U0001f916"]))
    assert drawn.any()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install fonts, e.g. fonts-noto-core and fonts-noto-cjk" in caplog.text
    heatmap._fonts_of.cache_clear()


def test_other_fonts_serve_only_what_the_first_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = {"DejaVu Sans": "DejaVuSans.ttf", "cmr10": "cmr10.ttf", "STIXGeneral": "STIXGeneral.ttf"}
    fonts = [(family, str(shipped / file)) for family, file in files.items()]
    monkeypatch.setattr(heatmap, "_installed_fonts", lambda: fonts)
    heatmap._fonts_of.cache_clear()
    assert fonts_of("schrijven", "s x r ɛ i̯") == ["DejaVu Sans"]
    assert fonts_of("a", "\u1d81") == ["DejaVu Sans", "STIXGeneral"]
    heatmap._fonts_of.cache_clear()


def test_saved_picture_is_the_drawn_one(tmp_path: Path) -> None:
    figure = draw(4, 5)
    save(figure, tmp_path / "picture.png")
    pixels = to_array(figure)
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal((imread(tmp_path / "picture.png")[..., :3] * 255).round(), pixels)
