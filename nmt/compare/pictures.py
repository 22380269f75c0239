"""Pictures of a comparison, drawn by matplotlib: PNG and SVG files, and SVG for the page in the page's colours.

In the code, systems are numbered from 0 by their rank. Each of the first six systems has a colour and a marker. The
others are grey, so that many systems stay readable. A line or point has its system's rank beside it, and a legend on
the right lists ranks and names.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from unicodedata import east_asian_width
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator

from nmt.compare.columns import score_decimals
from nmt.compare.compare import SIGNIFICANT, Comparison
from nmt.evaluate.metrics import METRICS, sign_of
from nmt.translate.heatmap import fonts_of, one_warning_of_boxes

# Colours of the page's light theme, by the CSS custom property that replaces the colour on the page.
THEME = {
    "ink": "#1a1f26",
    "muted": "#586270",
    "rule": "#dce0e6",
    "paper": "#ffffff",
    "colour-0": "#2f5cf0",
    "colour-1": "#a85a12",
    "colour-2": "#1b9e89",
    "colour-3": "#8f1d4f",
    "colour-4": "#a98c16",
    "colour-5": "#5e2fa0",
}
COLOURS = [colour for name, colour in THEME.items() if name.startswith("colour")]
INK, MUTED, RULE, PAPER = (THEME[name] for name in ("ink", "muted", "rule", "paper"))
MARKERS, GLYPHS = "os^Dv*", "●■▲◆▼★"  # markers of the coloured systems, for matplotlib and for tables
SHADES = LinearSegmentedColormap.from_list("shades", ["#e9a15b", "#fbf3ea", "#f4f5f7", "#eaf0fc", "#86a8ee"])
CELL_INK = "#15191e"  # colour of text on SHADES, which are the same in both themes
WIDTH = 8.6  # width of a picture in inches
FONT, LINE = 8.5, 12.0  # size of a name and height of its line, in points
DPI = 200
MAX_NAME = 30  # largest number of characters of a name
CENTRAL = 0.9  # fraction of the systems that decides the limits of an axis; systems beyond are drawn at its edge
MIN_TICKS = 3  # a logarithmic axis with fewer ticks at round multiples of powers of 10 gets evenly spaced ticks
SVG = "http://www.w3.org/2000/svg"
Drawn = tuple[str, Figure, Mapping[str, Sequence[str]]]  # title, figure and hints of a Picture
STYLE: Any = {
    **{"font.size": FONT, "axes.labelsize": FONT, "axes.titlesize": 11, "xtick.labelsize": 8, "ytick.labelsize": 8},
    **{"text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED},
    **{"axes.edgecolor": RULE, "axes.spines.top": False, "axes.spines.right": False, "grid.color": RULE},
    **{"grid.linewidth": 0.7, "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titleweight": "bold"},
    **{"figure.facecolor": PAPER, "axes.facecolor": PAPER, "text.parse_math": False, "svg.fonttype": "none"},
}


@dataclass(frozen=True)
class Picture:
    """A figure with its tooltips, `hints`: a text for each point of an artist, by the artist's id."""

    name: str  # file name without suffix
    title: str
    figure: Figure
    hints: Mapping[str, Sequence[str]]

    def png(self) -> bytes:
        """Render as PNG."""
        return self._rendered(format="png", dpi=DPI, metadata={"Software": None})

    @cached_property
    def svg(self) -> str:
        """Render as SVG, whose ids differ from those of pictures with other names."""
        return self._rendered(format="svg", metadata={"Date": None, "Creator": None}).decode()

    def inline(self) -> Markup:
        """Convert to SVG with the page's colours and hints. The attribute data-system of an element is the number of
        the system that it shows."""
        root = ElementTree.fromstring(self.svg)
        for parent in root.iter():
            for child in list(parent):
                if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                    parent.remove(child)
        for element in root.iter():
            artist = element.get("id", "")
            if number := re.match(r"system-(\d+)-", artist):
                element.set("data-system", number[1])
                for point, hint in zip(element.iter(f"{{{SVG}}}use"), self.hints.get(artist, ()), strict=False):
                    ElementTree.SubElement(point, f"{{{SVG}}}title").text = hint
            if not element.tag.endswith(("clipPath", "path")):
                element.attrib.pop("id", None)
        root.attrib |= {"class": "chart", "role": "img", "aria-label": self.title}
        for size in ("width", "height"):
            root.attrib.pop(size)
        ElementTree.register_namespace("", SVG)
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        text = ElementTree.tostring(root, encoding="unicode")
        text = re.sub(r"font-family: [^;]*; ?", "", text)  # the page sets the font
        for variable, colour in THEME.items():
            text = text.replace(colour, f"var(--{variable})")
        return Markup(text)

    def _rendered(self, **options: Any) -> bytes:  # noqa: ANN401
        file = io.BytesIO()
        with _style(salt=self.name):
            self.figure.savefig(file, **options)
        return file.getvalue()


class Series(NamedTuple):
    """The points of one system, at least one."""

    number: int
    name: str
    points: list[tuple[float, float]]


def draw(comparison: Comparison) -> dict[str, Picture]:
    """Draw the pictures of a comparison, by name. A picture whose values are unknown is left out."""
    systems, metric, heading = comparison["systems"], comparison["metric"], METRICS[comparison["metric"]].heading
    names = [f"{rank} {_shortened(system['name'])}" for rank, system in enumerate(systems, 1)]

    def series(points: Iterable[Iterable[tuple[float | None, float | None]]]) -> list[Series]:
        """Make a series of each system's points, without points that lack a coordinate and systems without points."""
        complete = [[(x, y) for x, y in of_system if x is not None and y is not None] for of_system in points]
        numbered = enumerate(zip(names, complete, strict=True))
        return [Series(number, name, of_system) for number, (name, of_system) in numbered if of_system]

    pictures: dict[str, Drawn | None] = {}
    with _style(names):
        pictures["differences"] = _forest(comparison, names)
        # A time of 0, of a training too short to measure, has no place on a logarithmic axis.
        costs = [system["cost_seconds"] or None for system in systems]
        label, length = _time_axis(costs)
        points = [[(cost and cost / length, system[metric])] for cost, system in zip(costs, systems, strict=True)]
        pictures["cost"] = _scatter(series(points), f"{heading} against training time", label, metric)
        times = [point["seconds"] for system in systems for point in system["curve"]]
        timed = all(times)
        (label, length), x = (_time_axis(times), "seconds") if timed else (("epoch", 1), "epoch")
        curves = series([(point[x] / length, point["score"]) for point in system["curve"]] for system in systems)
        pictures["curves"] = _lines(curves, "Learning curves", label, f"validation {heading}", logarithmic=timed)
        pictures["length"] = _lengths(systems, names, metric)
    return {name: Picture(name, *drawn) for name, drawn in pictures.items() if drawn is not None}


def key(number: int) -> Markup:
    """Return the HTML of a system's mark in tables, which has the form and colour of its marker in pictures."""
    if number >= len(COLOURS):
        return Markup('<span class="key" aria-hidden="true">·</span>')
    text = '<span class="key" aria-hidden="true" style="color: var(--colour-{})">{}</span>'
    return Markup(text).format(number, GLYPHS[number])


def _shortened(name: str) -> str:
    """Leave out the middle of a name that has more than MAX_NAME characters."""
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[: half - 1]}…{name[-half:]}"


@contextmanager
def _style(names: Sequence[str] = (), salt: str = "nmt") -> Iterator[None]:
    """Apply STYLE, with fonts for the names of the systems. Pictures with different `salt` have different ids in
    SVG."""
    fonts = [*fonts_of(*names), "sans-serif"]
    with one_warning_of_boxes(), matplotlib.rc_context({**STYLE, "font.family": fonts, "svg.hashsalt": salt}):
        yield


def _time_axis(seconds: Iterable[float | None]) -> tuple[str, int]:
    """Choose a unit that suits the longest of some times; return the label of the axis and the unit in seconds."""
    longest = max((value for value in seconds if value is not None), default=0)
    unit, length = next(((u, n) for u, n in (("hours", 3600), ("minutes", 60)) if longest >= 2 * n), ("seconds", 1))
    return f"training time, {unit}", length


def _marking(number: int) -> dict[str, Any]:
    """Return the matplotlib style of a system's lines and points."""
    if number < len(COLOURS):
        return {"color": COLOURS[number], "marker": MARKERS[number], "linewidth": 1.8, "zorder": 3 - number / 100}
    return {"color": MUTED, "marker": "o", "linewidth": 0.9, "alpha": 0.55, "markersize": 2.5, "zorder": 2}


def _axes(title: str, height: float, left: float, right: float, top: float = 0.42) -> tuple[Figure, Axes]:
    """Create a figure with one axes, a grid at round numbers and no frame. Height and margins are in inches."""
    figure = Figure(figsize=(WIDTH, height), dpi=100)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / WIDTH, 0.55 / height, 1 - (left + right) / WIDTH, 1 - (0.55 + top) / height))
    axes.set_title(title, pad=10)
    axes.tick_params(length=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.grid()
    axes.spines[:].set_visible(False)
    return figure, axes


def _text_inches(names: Sequence[str]) -> float:
    """Estimate an upper bound of the width of the longest name in inches."""
    wide = [sum(1.7 if east_asian_width(character) in "WF" else 1.0 for character in name) for name in names]
    return max(wide, default=0.0) * FONT * 0.62 / 72


def _central_limits(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Choose axis limits within which most intervals lie, so that a few distant intervals do not squeeze the others."""
    middles = (np.array(lows) + np.array(highs)) / 2
    centre = float(np.median(middles))
    radius = float(np.quantile(np.abs(middles - centre), CENTRAL)) * 1.5
    inside = [abs(middle - centre) <= radius or len(middles) <= 3 for middle in middles]  # noqa: PLR2004
    low = min(value for value, shown in zip(lows, inside, strict=True) if shown)
    high = max(value for value, shown in zip(highs, inside, strict=True) if shown)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def _forest(comparison: Comparison, names: Sequence[str]) -> Drawn | None:
    """Draw the differences from the baseline, or the scores if there is none, with their 95 % intervals."""
    metric, baseline, systems = comparison["metric"], comparison["baseline"], comparison["systems"]
    key = metric if baseline is None else "difference"
    rows = [(number, system) for number, system in enumerate(systems) if system.get(key) is not None]
    if not rows:
        return None
    heading, show = METRICS[metric].heading, score_decimals(metric)
    values, halves = ([system[name] for _, system in rows] for name in (key, f"{key}_ci"))
    bounds = [(value - half, value + half) for value, half in zip(values, halves, strict=True)]
    low, high = _central_limits(*zip(*bounds, strict=True))
    if baseline is not None and low < 0 < high:
        low, high = min(low, -0.04 * (high - low)), max(high, 0.04 * (high - low))
    what = heading if baseline is None else f"{heading}: difference to {_shortened(baseline)}"
    title = f"{what}, with 95 % intervals"
    left = _text_inches([names[number] for number, _ in rows]) + 0.3
    figure, axes = _axes(title, 0.97 + 0.215 * max(len(rows), 3), left, 1.6)
    hints = {}
    for y, ((number, system), value, half) in enumerate(zip(rows, values, halves, strict=True)):
        significant = baseline is not None and system["p"] < SIGNIFICANT
        colour = MUTED if not significant else COLOURS[0] if value * sign_of(metric) > 0 else COLOURS[1]
        artist = f"system-{number}-forest"
        if y % 2:
            axes.axhspan(y - 0.5, y + 0.5, color=RULE, alpha=0.35, linewidth=0, zorder=0)
        sign = "+" if baseline is not None and value >= 0 else ""
        text = f"{sign}{show(value)} ± {show(half)}{' *' if significant else ''}"
        hints[artist] = [f"{system['name']}\n{text}"]
        if low <= value <= high:
            ends = max(value - half, low), min(value + half, high)
            interval: Any = {"linewidth": 1.8, "solid_capstyle": "round", "zorder": 2}
            axes.plot(ends, [y, y], color=colour, gid=f"system-{number}-interval", **interval)
            fill = colour if significant or baseline is None else PAPER
            x, marker = value, "o"
            point: Any = {"markersize": 5.5, "markerfacecolor": fill, "markeredgewidth": 1.4}
        else:
            x, marker = (low, "<") if value < low else (high, ">")
            point = {"markersize": 6, "clip_on": False}
        axes.plot([x], [y], color=colour, marker=marker, zorder=3, gid=artist, **point)
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "size": FONT}
        ink = INK if significant or baseline is None else MUTED
        axes.text(1.03, y, text, color=ink, gid=f"system-{number}-value", **place)
        axes.text(-0.02, y, names[number], ha="right", color=INK, gid=f"system-{number}-name", **place)
    if baseline is not None and low <= 0 <= high:
        axes.axvline(0, color=INK, linewidth=1, zorder=1)
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5), yticks=[])
    note = "" if baseline is None else "  (* and filled: significant after Holm's correction)"
    axes.set_xlabel(f"{heading}{note}")
    return title, figure, hints


def _lines(
    plotted: Sequence[Series], title: str, x_label: str, y_label: str, *, logarithmic: bool = False
) -> Drawn | None:
    """Draw a line for each system."""
    if not plotted:
        return None
    figure, axes = _axes_with_legend(title, plotted)
    hints = {}
    for line in reversed(plotted):
        artist = f"system-{line.number}-line"
        style = {"markersize": 4.5, **_marking(line.number), "clip_on": False}
        axes.plot(*zip(*line.points, strict=True), gid=artist, **style)
        hints[artist] = [f"{line.name}\n{x_label}: {x:.4g}\n{y_label}: {y:.4g}" for x, y in line.points]
    x_values, y_values = zip(*(point for line in plotted for point in line.points), strict=True)
    margins = [0.04 * (max(values) - min(values)) or 0.5 for values in (x_values, y_values)]
    axes.set(ylim=(min(y_values) - margins[1], max(y_values) + margins[1]), xlabel=x_label, ylabel=y_label)
    if logarithmic:
        _scale_logarithmically(axes, x_values, 0.04)
    else:
        axes.set_xlim(min(x_values) - margins[0], max(x_values) + margins[0])
    axes.grid(visible=False, axis="x")
    axes.spines["bottom"].set_visible(True)
    for line in plotted:
        _write_rank(axes, line, line.points[-1])
    return title, figure, hints


def _axes_with_legend(title: str, plotted: Sequence[Series]) -> tuple[Figure, Axes]:
    """Create a figure with one axes, and a legend of all systems on the right."""
    names = [line.name for line in plotted]
    height = max(4.4, 1.1 + len(plotted) * (LINE + 0.5) / 72)
    figure, axes = _axes(title, height, 0.7, _text_inches(names) + 0.5)
    step = LINE / 72 / (axes.get_position().height * height)
    for row, line in enumerate(plotted):
        place: Any = {"transform": axes.transAxes, "va": "center", "size": FONT, "gid": f"system-{line.number}-name"}
        axes.text(1.06, 1 - (row + 0.5) * step, line.name, color=_marking(line.number)["color"], **place)
    return figure, axes


def _write_rank(axes: Axes, line: Series, point: tuple[float, float], text: str = "") -> None:
    """Write the rank of a system, and after it the text, above a point, on its right."""
    style: Any = {"textcoords": "offset points", "va": "center", "size": 7, "color": _marking(line.number)["color"]}
    written = axes.annotate(f"{line.number + 1}{text}", point, (5, 4), **style)
    written.set_gid(f"system-{line.number}-rank")


def _scatter(plotted: Sequence[Series], title: str, x_label: str, metric: str) -> Drawn | None:
    """Draw a point for each system, and the Pareto front: the systems that are better than all faster ones."""
    if not plotted:
        return None
    sign, show = sign_of(metric), score_decimals(metric)
    points = [line.points[0] for line in plotted]
    low, high = _central_limits([y for _, y in points], [y for _, y in points])
    shown = [(x, min(max(y, low), high)) for x, y in points]
    figure, axes = _axes_with_legend(title, plotted)
    axes.set(ylim=(low, high), xlabel=x_label, ylabel=METRICS[metric].heading)
    _scale_logarithmically(axes, [x for x, _ in points], 0.06)
    front = pareto_front([(x, sign * y) for x, y in points])
    steps = sorted(shown[index] for index in front)
    axes.step(*zip(*steps, strict=True), where="post", color=MUTED, linewidth=1.2, zorder=1)
    hints = {}
    for index, (line, (x, y), place) in enumerate(zip(plotted, points, shown, strict=True)):
        artist = f"system-{line.number}-point"
        style = {**_marking(line.number), "linewidth": 0, "alpha": 1, "clip_on": False, "markersize": 7}
        if index not in front:
            style |= {"markersize": 5.5, "markerfacecolor": PAPER, "markeredgewidth": 1.2}
        axes.plot(*place, gid=artist, **style)
        hints[artist] = [f"{line.name}\n{x_label}: {x:.4g}\n{METRICS[metric].heading}: {show(y)}"]
        outside = "" if y == place[1] else f" ({show(y)} {'↓' if y < place[1] else '↑'})"
        _write_rank(axes, line, place, outside)
    if len(front) > 1:
        axes.set_xlabel(f"{axes.get_xlabel()}; line: Pareto front, filled points")
    return title, figure, hints


def _scale_logarithmically(axes: Axes, values: Sequence[float], margin: float) -> None:
    """Make the x axis logarithmic, and say so in its label. margin: on both sides, as a fraction of its length."""
    space = 1.02 * (max(values) / min(values)) ** margin
    start, end = min(values) / space, max(values) * space
    axes.set(xscale="log", xlim=(start, end), xlabel=f"{axes.get_xlabel()} (logarithmic)")
    ticks = {20: (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), 1000: (1.0, 2.0, 5.0)}
    shown = next((multiples for limit, multiples in ticks.items() if end <= limit * start), (1.0,))
    locator: Locator = LogLocator(subs=shown)
    if sum(start <= tick <= end for tick in locator.tick_values(start, end)) < MIN_TICKS:
        locator = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.6g}")


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Find the indices of the Pareto front of points (cost, quality): no other point that costs no more is as good.
    Of equal points, it has the first."""
    front, best = set(), -math.inf
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            front.add(index)
            best = points[index][1]
    return front


def _lengths(systems: Sequence[Mapping[str, Any]], names: Sequence[str], metric: str) -> Drawn | None:
    """Draw scores by source length as a table. The shade of a cell is its distance from the median system."""
    longest = max((system["by_length"] for system in systems), key=len)
    if len(longest) <= 1:
        return None
    values = np.array([[part["score"] for part in system["by_length"]] for system in systems])
    distance = values - np.median(values, axis=0)
    limit = max(3 * float(np.median(np.abs(distance))), 0.5)
    title = f"{METRICS[metric].heading} by source length"
    figure, axes = _axes(title, 1.17 + 0.235 * len(systems), _text_inches(names) + 0.3, 0.2, 0.62)
    edges = [np.arange(size + 1) - 0.5 for size in distance.T.shape]
    axes.pcolormesh(*edges, distance, cmap=SHADES, vmin=-limit, vmax=limit, edgecolors=PAPER, linewidth=0.6)
    axes.invert_yaxis()
    axes.grid(visible=False)
    centred: Any = {"ha": "center", "va": "center", "size": FONT, "color": CELL_INK}
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.1f}", gid=f"system-{row}-cell", **centred)
    for row, name in enumerate(names):
        place: Any = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right", "size": FONT}
        axes.text(-0.015, row, name, gid=f"system-{row}-name", **place)
    ranges = ["\N{EN DASH}".join(map(str, dict.fromkeys(part["words"]))) for part in longest]
    axes.set_xticks(range(len(ranges)), ranges)
    axes.tick_params(top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.set_yticks([])
    axes.set_xlabel("words of the source; shades: distance from the median system of the column")
    return title, figure, {}
