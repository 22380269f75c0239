"""Alignment heatmaps, with a row for each target token and a column for each source token. They are drawn without
pyplot's global state.

Shapes: T target tokens, S source tokens, H x W pixels.
"""

import logging
import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from warnings import catch_warnings, filterwarnings

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager, get_font
from matplotlib.image import imsave
from numpy.typing import NDArray

from nmt.config.errors import printable
from nmt.data.word_alignment import END, WORD_START, words_of_pieces

log = logging.getLogger(__name__)

DPI = 100
# Sizes in inches. Cells have CELL_SIZE as long as the matrix is at most MAX_SIDE wide and high. With more tokens they
# shrink to SMALL_CELL_SIZE, keep this size up to a matrix of MAX_LARGE_SIDE, and then shrink further.
CELL_SIZE, MAX_SIDE = 0.32, 19.2
SMALL_CELL_SIZE, MAX_LARGE_SIDE = 0.2, 35.0
MARGIN = 0.15
BAR_WIDTH, MAX_BAR_LENGTH = 0.14, 3.2
LABEL_ANGLE = 60  # slant of the source labels in degrees
LETTER = 2  # characters of a letter's label, which may have a mark
MIN_FONT, MAX_FONT, TITLE_FONT = 6.5, 9.9, 11.0  # points
MAX_LABEL_LENGTH = 24  # characters
CONTINUATION, SPACE = "•", "␣"
MARKS = {CONTINUATION: "• continues the word before", SPACE: "␣ is a space; there is also one before the first word"}
RIGHT_TO_LEFT_MARK = "\u200f"
COLOURS = "viridis"  # perceptually uniform
INK, MUTED, GRID = "#1a1a1a", "#666666", "#ffffff44"
NOTE: dict[str, Any] = {"size": 7.5, "color": MUTED}  # style of explanations
FONT = "DejaVu Sans"  # comes with matplotlib; has Latin, Greek, Cyrillic, Arabic, Hebrew, Georgian, Armenian and IPA


@contextmanager
def one_warning_of_boxes() -> Iterator[None]:
    """Log one warning per process, in place of matplotlib's warnings for each character that no font has."""
    with catch_warnings(record=True) as caught:
        filterwarnings("always", message="Glyph .* missing from font")
        yield
    if any("missing from font" in str(warning.message) for warning in caught):
        _warn_of_boxes()


@cache
def _warn_of_boxes() -> None:
    log.warning(
        "pictures show boxes for characters that no installed font has; install fonts, e.g. fonts-noto-core and "
        "fonts-noto-cjk"
    )


def fonts_of(*texts: str) -> list[str]:
    """List font families, DejaVu Sans first, that together have the characters of some texts, as far as an installed
    font has them. matplotlib takes each character from the first family of such a list that has it."""
    return _fonts_of(frozenset("".join(texts)))


@cache
def _fonts_of(characters: frozenset[str]) -> list[str]:
    families, missing = [FONT], characters
    for family, file in _installed_fonts():
        font = get_font(file)
        found = {character for character in missing if font.get_char_index(ord(character))}
        families += [family] if found and family != FONT else []
        if not (missing := missing - found):
            break
    return families


@cache
def _installed_fonts() -> list[tuple[str, str]]:
    """List the family and the file of all installed fonts: DejaVu Sans first, then others without serifs."""
    upright = [entry for entry in fontManager.ttflist if entry.style == "normal" and "Last Resort" not in entry.name]
    files = {entry.name: entry.fname for entry in sorted(upright, key=lambda entry: entry.weight in {400, "normal"})}
    return sorted(files.items(), key=lambda item: (item[0] != FONT, "Sans" not in item[0], len(item[0]), item[0]))


@one_warning_of_boxes()
def draw_alignment(
    weights: NDArray[np.floating[Any]],
    source: Sequence[str],
    target: Sequence[str],
    title: str = "",
    meaning: str = "attention weight",
) -> Figure:
    """Draw weights (T, S) in [0, 1] as T x S square cells, labelled with tokens.

    Tokens are words, characters or SentencePiece pieces; a piece that continues a word is shown as "•piece", a space
    between characters as "␣". `meaning` labels the colour bar. Raises ValueError if the matrix is empty or does not
    match the tokens.

    The figure grows up to 60 tokens on the longer side; then the cells shrink up to 96 tokens, the figure grows again
    up to 175, and beyond that the cells shrink further. If the labels would overlap, only every n-th is shown.
    """
    if weights.shape != (len(target), len(source)) or not weights.size:
        raise ValueError(f"weights of shape {weights.shape} for {len(target)} target and {len(source)} source tokens")
    rows, columns = weights.shape
    longer = max(rows, columns)
    cell = min(CELL_SIZE, max(MAX_SIDE / longer, SMALL_CELL_SIZE), MAX_LARGE_SIDE / longer)
    figure = Figure(figsize=(columns * cell, rows * cell), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)  # measures all texts; without it, each text would create a canvas
    axes = figure.add_axes((0, 0, 1, 1))
    cells = axes.pcolormesh(weights, cmap=COLOURS, vmin=0, vmax=1)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.spines[:].set_visible(False)
    grid = [[(0, row), (columns, row)] for row in range(1, rows)]
    grid += [[(column, 0), (column, rows)] for column in range(1, columns)]
    axes.add_collection(LineCollection(grid, colors=GRID, linewidths=min(0.6, cell * 72 / 40)), autolim=False)
    labels = token_labels(source), token_labels(target)
    _label(axes, *labels, title, points=cell * 72)
    if notes := [note for mark, note in MARKS.items() if any(label[:1] == mark for label in labels[0] + labels[1])]:
        below = -figure.get_tightbbox().y0 + 0.07  # inches
        axes.text(0, rows + below / cell, "\n".join(notes), va="top", **NOTE)
    _draw_bar(figure, cells, meaning)
    _fit(figure)
    return figure


def _label(axes: Axes, source: Sequence[str], target: Sequence[str], title: str, points: float) -> None:
    """Set the title, and label every row and column, or every n-th if all labels would overlap. Single letters stand
    upright, longer labels of columns are slanted. points: the side of a cell, in points."""
    size = min(max(0.62 * points, MIN_FONT), MAX_FONT)
    step = math.ceil(1.2 * size / (points * math.sin(math.radians(LABEL_ANGLE))))
    upright = all(len(label.rstrip(RIGHT_TO_LEFT_MARK)) <= LETTER or label == END for label in source)
    slant: dict[str, Any] = {"rotation": LABEL_ANGLE, "rotation_mode": "anchor", "ha": "left", "va": "center"}
    # Dollar signs in text that comes from data do not start a formula.
    style: dict[str, Any] = {"family": fonts_of(*source, *target, title), "color": INK, "parse_math": False}
    columns, rows = np.arange(0, len(source), step), np.arange(0, len(target), step)
    axes.set_xticks(columns + 0.5, source[::step], size=size, **({} if upright else slant), **style)
    axes.set_yticks(rows + 0.5, target[::step], size=size, **style)
    axes.tick_params(length=2, color=MUTED)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("source", **NOTE)
    axes.set_ylabel("target", **NOTE)
    axes.set_title(printable(title), size=TITLE_FONT, loc="left", **style)


def _draw_bar(figure: Figure, cells: QuadMesh, meaning: str) -> None:
    """Draw the colour bar right of the matrix, aligned with its top."""
    width, height = figure.get_size_inches()
    length = min(1.0, MAX_BAR_LENGTH / height)
    bar = figure.add_axes((1 + 0.2 / width, 1 - length, BAR_WIDTH / width, length))
    figure.colorbar(cells, cax=bar, ticks=[0, 0.5, 1])
    bar.tick_params(labelsize=NOTE["size"], labelcolor=MUTED, color=MUTED, length=2)
    bar.set_ylabel(meaning, **NOTE)
    bar.spines[:].set_visible(False)


def _fit(figure: Figure) -> None:
    """Enlarge the figure so that it includes labels and colour bar. All axes keep their size in inches."""
    old = figure.get_size_inches()
    drawn = figure.get_tightbbox()
    new = np.array(drawn.size) + 2 * MARGIN
    offset = MARGIN - np.array(drawn.min)
    figure.set_size_inches(*new)
    for axes in figure.axes:
        box = axes.get_position()
        axes.set_position((*((box.min * old + offset) / new), *(box.size * old / new)))


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Make a label for each token: a piece that continues a word starts with "•", control characters are escaped.

    If each "▁" is a piece of its own, the pieces are characters: "▁" becomes "␣", and no piece has a "•".
    """
    labels = [_visible(token.replace(WORD_START, " ").strip(" ")) or SPACE for token in tokens]
    if any(token.startswith(WORD_START) and token != WORD_START for token in tokens):
        words = words_of_pieces(tokens)
        for position in range(1, len(tokens)):
            if words[position] == words[position - 1]:
                labels[position] = CONTINUATION + labels[position]
    labels = [label if len(label) <= MAX_LABEL_LENGTH else f"{label[: MAX_LABEL_LENGTH - 1]}…" for label in labels]
    # A label without a letter, such as "•.", has no direction. In a right-to-left text, a mark gives it one.
    if _direction("".join(labels)) == "right to left":
        labels = [label if _direction(label) else label + RIGHT_TO_LEFT_MARK for label in labels]
    return labels


def _visible(text: str) -> str:
    """Escape control characters, and make a letter that cannot stand alone visible: a combining mark gets a dotted
    circle, and a part of a Korean syllable, such as U+1112, becomes the letter of its name, U+314E."""
    if len(text) == 1 and (part := re.match("HANGUL (CHOSEONG|JUNGSEONG|JONGSEONG) ", unicodedata.name(text, ""))):
        with suppress(KeyError):
            text = unicodedata.lookup(f"HANGUL LETTER {part.string[part.end() :]}")
    return ("\u25cc" if unicodedata.category(text[:1] or " ")[0] == "M" else "") + printable(text)


def _direction(text: str) -> str | None:
    """Find the writing direction of the first letter that has one."""
    directions = {"L": "left to right", "R": "right to left", "AL": "right to left"}
    kinds = (unicodedata.bidirectional(character) for character in text)
    return next((directions[kind] for kind in kinds if kind in directions), None)


def to_array(figure: Figure) -> NDArray[np.uint8]:
    """Draw the figure as (H, W, 3) RGB pixels."""
    return _draw(figure)[..., :3]


def save(figure: Figure, file: Path | BinaryIO) -> None:
    """Write the figure as PNG."""
    imsave(file, _draw(figure), format="png")


@one_warning_of_boxes()
def _draw(figure: Figure) -> NDArray[np.uint8]:
    """Draw the figure as (H, W, 4) RGBA pixels."""
    canvas: Any = FigureCanvasAgg(figure)  # its methods are untyped
    canvas.draw()
    return np.array(canvas.buffer_rgba())
