"""Charts for an HTML page, as inline SVG styled by the page.

Systems are numbered from 0; the number selects a system's colour, dash and marker in every chart. Colours are the
page's custom properties --colour-0, --colour-1, ...; all other elements have CSS classes. Positions are in SVG units.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup
from matplotlib.ticker import Locator, LogLocator, MaxNLocator
from matplotlib.transforms import Bbox

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, BOTTOM = 44, 468, 26, 262  # edges of the plot area
PADDING = 0.05  # between the data and the plot's edge, as a share of the data's range
LETTER, LINE = 7.5, 15  # mean width of a letter and height of a line, in the largest font size of the page
MAX_NAME_LENGTH = 24  # letters of a name beside a point
NAME_MARGIN = 50  # right of the plotted points, for their names
MAX_MARKERS = 12  # visible ones on a line; the others appear under the pointer
# Tick multiples of powers of ten on a logarithmic axis, by the largest ratio of the axis ends.
LOG_TICKS = ((20, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)), (1000, (1.0, 2.0, 5.0)), (math.inf, (1.0,)))

COLOURS = 6
DASHES = ("none", "7 3", "2 2.5", "9 3 2 3")
# Seven, which is coprime to six: systems of the same colour have different markers.
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-5 4.8 3.6h-9.6z",
    "M0-5.2 5.2 0 0 5.2-5.2 0z",
    "M0 5 4.8-3.6h-9.6z",
    "M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "M-2.2-5.5h4.4v11h-4.4z",
)


@dataclass(frozen=True)
class Series:
    """The data of one system; points with a missing coordinate are not drawn."""

    system: int
    name: str
    points: Sequence[tuple[float | None, float | None]]

    def complete_points(self) -> list[tuple[float, float]]:
        """The points that have both coordinates."""
        return [(x, y) for x, y in self.points if x is not None and y is not None]


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from values in [low, high] to positions in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float, log: bool = False) -> "Scale":
        """A scale that holds all values with some padding."""
        low, high = min(values), max(values)
        if log:
            factor = (high / low) ** PADDING if high > low else 2
            return cls(low / factor, high * factor, start, end, log)
        padding = PADDING * (high - low) or 0.5
        return cls(low - padding, high + padding, start, end)

    def position(self, value: float) -> float:
        """Position of a value, rounded to 0.1."""
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> dict[float, str]:
        """Round values within the scale, with their labels."""
        locator: Locator = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
        if self.log:
            locator = LogLocator(subs=next(subs for ratio, subs in LOG_TICKS if self.high <= ratio * self.low))
        values = locator.tick_values(self.low, self.high)
        return {float(value): f"{value:.6g}" for value in values if self.low <= value <= self.high}


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    x_ticks: Mapping[float, str] | None = None,
    y_values: Sequence[float] = (),
) -> Markup:
    """A line for each system; needs at least one complete point. `x_ticks` (value -> label) replaces round values. The
    y axis holds `y_values` too, so that several charts can have the same one."""
    x, y = _scales(series, y_values=y_values)
    ticks = x_ticks or x.ticks()
    chart = _axes(f"{title}: lines of {_names(series)}", x, y, ticks, x_label, y_label)
    for line in series:
        group, points = _group(chart, line), line.complete_points()
        positions = [f"{x.position(x_value)} {y.position(y_value)}" for x_value, y_value in points]
        _line(group, line.system, "M" + "L".join(positions) if positions else "")
        step = math.ceil(len(points) / MAX_MARKERS)
        for index, ((x_value, y_value), position) in enumerate(zip(points, positions, strict=True)):
            x_text = ticks.get(x_value, f"{x_value:.4g}")
            tooltip = f"{line.name}\n{x_label}: {x_text}\n{y_label}: {y_value:.2f}"
            _marker(group, line.system, position, tooltip, quiet=index % step > 0)
    return _markup(chart)


def scatter_chart(series: Sequence[Series], title: str, x_label: str, y_label: str, log_x: bool = False) -> Markup:
    """Points labelled with their systems' names; needs at least one complete point."""
    x, y = _scales(series, RIGHT - NAME_MARGIN, log_x)
    chart = _axes(f"{title}: points of {_names(series)}", x, y, x.ticks(), x_label, y_label)
    points = [(line, *point) for line in series for point in line.complete_points()]
    positions = [(x.position(x_value), y.position(y_value)) for _, x_value, y_value in points]
    labels = _labels([line.name for line, *_ in points])
    boxes = _label_boxes(positions, labels)
    for (line, x_value, y_value), (left, top), label, box in zip(points, positions, labels, boxes, strict=True):
        group = _group(chart, line)
        edge, anchor = (box.x0, "start") if box.x0 > left else (box.x1, "end")
        middle = (box.y0 + box.y1) / 2
        if middle != top:
            SubElement(group, "path", {"class": "leader", "d": f"M{left} {top}L{edge:g} {middle:g}"})
        tooltip = f"{line.name}\n{x_label}: {x_value:.4g}\n{y_label}: {y_value:.2f}"
        _marker(group, line.system, f"{left} {top}", tooltip)
        _text(group, label, edge, middle + 4, anchor)
    return _markup(chart)


def legend_key(system: int) -> Markup:
    """A short piece of the system's line with its marker, for legends and tables."""
    attributes = {"class": "key", "viewBox": "0 0 30 12", "aria-hidden": "true", "style": _colour(system)}
    picture = Element("svg", attributes)
    _line(picture, system, "M1 6H29")
    _marker(picture, system, "15 6")
    return _markup(picture)


def _scales(
    series: Sequence[Series], right: float = RIGHT, log_x: bool = False, y_values: Sequence[float] = ()
) -> tuple[Scale, Scale]:
    x_found, y_found = zip(*(point for system in series for point in system.complete_points()), strict=True)
    return Scale.around(x_found, LEFT, right, log_x), Scale.around([*y_found, *y_values], BOTTOM, TOP)


def _axes(title: str, x: Scale, y: Scale, x_ticks: Mapping[float, str], x_label: str, y_label: str) -> Element:
    """A chart without data. Labels of the x axis take up to two rows; those without room are omitted."""
    chart = Element("svg", {"class": "chart", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": title})
    _text(chart, y_label, 0, 12, "start", "axis")
    for value, label in y.ticks().items():
        SubElement(chart, "path", {"class": "grid", "d": f"M{LEFT} {y.position(value)}H{RIGHT}"})
        _text(chart, label, LEFT - 8, y.position(value) + 4, "end", "tick")
    SubElement(chart, "path", {"class": "base", "d": f"M{LEFT} {BOTTOM}H{RIGHT}"})
    row_ends = [-math.inf, -math.inf]
    for value, label in sorted(x_ticks.items()):
        position, half = x.position(value), LETTER * len(label) / 2
        SubElement(chart, "path", {"class": "base", "d": f"M{position} {BOTTOM}v5"})
        row = next((row for row, end in enumerate(row_ends) if position - half > end + LETTER), None)
        if row is not None:
            _text(chart, label, position, BOTTOM + 18 + LINE * row, "middle", "tick")
            row_ends[row] = position + half
    rows = sum(end > -math.inf for end in row_ends)
    _text(chart, x_label, (LEFT + RIGHT) / 2, BOTTOM + 24 + LINE * rows, "middle", "axis")
    return chart


def _label_boxes(points: Sequence[tuple[float, float]], labels: Sequence[str]) -> list[Bbox]:
    """A free box for each label: right or left of its point, shifted up or down as little as possible."""
    occupied = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    for (x, y), label in zip(points, labels, strict=True):
        width = LETTER * len(label)
        candidates = [
            Bbox.from_bounds(left, y + shift - LINE / 2, width, LINE)
            for shift in sorted(range(-8 * LINE, 8 * LINE + 1, LINE // 3), key=abs)
            for left in (x + 9, x - 9 - width)
        ]
        inside = [box for box in candidates if box.x0 >= LEFT and box.x1 <= WIDTH and box.y0 >= 0 and box.y1 <= BOTTOM]
        free = [box for box in inside if not box.count_overlaps(occupied)]
        occupied.append((free or inside or candidates)[0])
    return occupied[len(points) :]


def _names(series: Sequence[Series]) -> str:
    return ", ".join(system.name for system in series)


def _labels(names: Sequence[str]) -> list[str]:
    """The names; one that is too long has its keys without their sections, such as "alignment=posterior" for
    "attention/alignment=posterior", unless that is another one's, too, and is cut if it is still too long."""
    short = [" ".join(re.sub(r"^\S*[/.](?=[^/.]*=)", "", word) for word in name.split()) for name in names]
    labels = [
        name if len(name) <= MAX_NAME_LENGTH or short.count(s) > 1 else s for name, s in zip(names, short, strict=True)
    ]
    return [name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…" for name in labels]


def _colour(system: int) -> str:
    return f"--colour:var(--colour-{system % COLOURS})"


def _group(chart: Element, series: Series) -> Element:
    return SubElement(chart, "g", {"data-system": str(series.system), "style": _colour(series.system)})


def _line(parent: Element, system: int, path: str) -> None:
    dash = DASHES[system // COLOURS % len(DASHES)]
    SubElement(parent, "path", {"class": "line", "d": path, "stroke-dasharray": dash})


def _marker(parent: Element, system: int, position: str, tooltip: str = "", quiet: bool = False) -> None:
    """A marker; a quiet one is visible only under the pointer."""
    shape = {"class": "marker quiet" if quiet else "marker", "d": MARKERS[system % len(MARKERS)]}
    marker = SubElement(parent, "path", {**shape, "transform": f"translate({position})"})
    if tooltip:
        SubElement(marker, "title").text = tooltip


def _text(parent: Element, text: str, x: float, y: float, anchor: str, css_class: str = "name") -> None:
    attributes = {"class": css_class, "x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    SubElement(parent, "text", attributes).text = text


def _markup(element: Element) -> Markup:
    return Markup(tostring(element, encoding="unicode"))
