"""Alignment heatmaps: target tokens down, source tokens across, drawn without pyplot and its global state.

T target tokens, S source tokens, H x W pixels.
"""

import math
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.image import AxesImage, imsave
from numpy.typing import NDArray

from nmt.metrics.alignment import WORD_START, words_of_pieces

DPI = 100
CELL = 0.32  # inches: the side of a cell, as long as the longer side of the matrix stays within SIDE
SIDE = 19.2  # inches
MARGIN = 0.15  # inches around everything
BAR, LONGEST_BAR = 0.14, 3.2  # inches: width and greatest length of the colour bar
ANGLE = 60  # degrees of the source labels
SMALLEST_FONT, TITLE_FONT = 6.5, 11.0  # points
LONGEST_LABEL = 24  # characters
CONTINUATION = "•"
INVISIBLE = {"Cc", "Cs", "Zl", "Zp"}  # control characters, surrogates, line and paragraph separators
COLOURS = "viridis"  # perceptually uniform
INK, MUTED, GRID = "#1a1a1a", "#666666", "#ffffff44"
NOTE: dict[str, Any] = {"size": 7.5, "color": MUTED}  # what explains the picture and is not its content

# DejaVu Sans comes with matplotlib; the others, where installed, add Chinese, Japanese and Korean.
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Arial Unicode MS")


@contextmanager
def _missing_glyphs_allowed() -> Iterator[None]:
    """A script without an installed font is drawn as boxes; a warning for each character helps nobody."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


@_missing_glyphs_allowed()
def draw_alignment(
    weights: NDArray[np.floating[Any]], source: Sequence[str], target: Sequence[str], title: str = ""
) -> Figure:
    """(T, S) weights from 0 to 1 -> a figure with T rows and S columns of square cells, labelled with tokens.

    Tokens are words or SentencePiece pieces; a piece that continues a word is shown as "•piece". The figure
    grows with the tokens up to 60 of them, beyond that the cells shrink, and where labels would touch only
    every n-th is shown. Raises ValueError if the tokens do not match the matrix or it is empty.
    """
    if weights.shape != (len(target), len(source)) or not weights.size:
        raise ValueError(
            f"weights of shape {weights.shape} for {len(target)} target and {len(source)} source tokens: "
            "one row per target and one column per source token is needed, and at least one of each"
        )
    rows, columns = weights.shape
    cell = min(CELL, SIDE / max(rows, columns))
    figure = Figure(figsize=(columns * cell, rows * cell), dpi=DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    image = axes.imshow(weights, cmap=COLOURS, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    _label(axes, token_labels(source), token_labels(target), title, points=cell * 72)
    _draw_bar(figure, image)
    _fit(figure)
    return figure


def _label(axes: Axes, source: Sequence[str], target: Sequence[str], title: str, points: float) -> None:
    """Name the rows and columns of cells of that many points, all of them or every n-th."""
    size = max(0.43 * points, SMALLEST_FONT)
    step = math.ceil(1.2 * size / (points * math.sin(math.radians(ANGLE))))
    installed = get_font_names()
    text: dict[str, Any] = {
        "family": [font for font in FONTS if font in installed],
        "color": INK,
        "parse_math": False,
    }
    slant: dict[str, Any] = {"rotation": ANGLE, "rotation_mode": "anchor", "ha": "left", "va": "center"}
    axes.set_xticks(range(0, len(source), step), source[::step], size=size, **slant, **text)
    axes.set_yticks(range(0, len(target), step), target[::step], size=size, **text)
    axes.tick_params(length=2, color=MUTED, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source", **NOTE)
    axes.set_ylabel("target", **NOTE)
    axes.set_title(_printable(title), size=TITLE_FONT, loc="left", **text)
    if any(label.startswith(CONTINUATION) for label in (*source, *target)):
        note = f"{CONTINUATION} continues the word before"
        axes.text(-0.5, len(target) - 0.5 + 5 / points, note, va="top", **NOTE)  # 5 points below the last row
    axes.set_xticks(np.arange(1, len(source)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(target)) - 0.5, minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color=GRID, linewidth=min(0.6, points / 40))
    axes.spines[:].set_visible(False)


def _draw_bar(figure: Figure, image: AxesImage) -> None:
    """The colour bar, right of the matrix from its top."""
    width, height = figure.get_size_inches()
    share = min(1.0, LONGEST_BAR / height)
    bar = figure.add_axes((1 + 0.2 / width, 1 - share, BAR / width, share))
    figure.colorbar(image, cax=bar, ticks=[0, 0.5, 1])
    bar.tick_params(labelsize=NOTE["size"], labelcolor=MUTED, color=MUTED, length=2)
    bar.set_ylabel("attention weight", **NOTE)
    bar.spines[:].set_visible(False)


def _fit(figure: Figure) -> None:
    """Grow the figure around what is drawn beyond it (labels, bar); every axes keeps its size in inches."""
    old = figure.get_size_inches()
    drawn = figure.get_tightbbox()
    new = np.array(drawn.size) + 2 * MARGIN
    offset = MARGIN - np.array(drawn.min)
    figure.set_size_inches(*new)
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((*((box.min * old + offset) / new), *(box.size * old / new)))


def token_labels(tokens: Sequence[str]) -> list[str]:
    """What stands beside the matrix: "•" before a continuation of a word, control characters made visible."""
    labels = [_printable(token.replace(WORD_START, " ").strip(" ") or "␣") for token in tokens]
    if any(token.startswith(WORD_START) for token in tokens):
        words = words_of_pieces(tokens)
        for position in range(1, len(tokens)):
            if words[position] == words[position - 1]:
                labels[position] = CONTINUATION + labels[position]
    return [label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…" for label in labels]


def to_array(figure: Figure) -> NDArray[np.uint8]:
    """(H, W, 3), red, green and blue."""
    canvas: Any = FigureCanvasAgg(figure)  # its methods are untyped
    with _missing_glyphs_allowed():
        canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG."""
    imsave(path, to_array(figure), format="png")


def _printable(text: str) -> str:
    """Control characters as Python writes them, such as \\n; letters of every script stay."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in INVISIBLE else character
        for character in text
    )
