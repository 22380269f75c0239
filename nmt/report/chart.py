"""Charts for a page: inline SVG whose colours follow the page's theme.

A system has a number, from 0, and by it the same colour, dash and marker in every chart. The colours are the page's
custom properties --colour-0, --colour-1, ...; what else is drawn has classes for the page to style.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup
from matplotlib.ticker import Locator, LogLocator, MaxNLocator

WIDTH, HEIGHT = 480, 320  # in units of the drawing, which the page scales
LEFT, RIGHT, TOP, BOTTOM = 44, 468, 26, 262  # the plot within it
PADDING = 0.05  # of the values' span, between them and the plot's edge
LETTER, LINE = 7.5, 15  # the usual width of a letter and the height of a line, as large as a phone shows them
LONGEST_NAME = 24  # letters beside a point
ROOM = 50  # for the names beside the rightmost points
MOST_MARKERS = 12  # on a line; its other points show theirs under the pointer
# Multiples of powers of ten at the ticks of a logarithmic axis, by the greatest ratio between its ends.
MULTIPLES = ((20, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)), (1000, (1.0, 2.0, 5.0)), (math.inf, (1.0,)))

COLOURS = 6
DASHES = ("none", "7 3", "2 2.5", "9 3 2 3")
# Seven, which has no divisor in common with six: systems that share a colour have different markers.
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
    """What a system adds to a chart: its points, of which those that lack a value are left out."""

    system: int
    name: str
    points: Sequence[tuple[float | None, float | None]]

    def known(self) -> list[tuple[float, float]]:
        """The points to draw."""
        return [(x, y) for x, y in self.points if x is not None and y is not None]


@dataclass(frozen=True)
class Scale:
    """From values to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float, log: bool = False) -> "Scale":
        """One with all of the values a little inside its ends."""
        low, high = min(values), max(values)
        if log:
            factor = (high / low) ** PADDING if high > low else 2
            return cls(low / factor, high * factor, start, end, log)
        space = PADDING * (high - low) or 0.5
        return cls(low - space, high + space, start, end)

    def place(self, value: float) -> float:
        """Where the value is."""
        low, high, value = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> dict[float, str]:
        """Round values between the ends, and how they are written."""
        ticks = self._locator().tick_values(self.low, self.high)
        return {float(tick): f"{tick:.6g}" for tick in ticks if self.low <= tick <= self.high}

    def _locator(self) -> Locator:
        if not self.log:
            return MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
        return LogLocator(subs=next(multiples for ratio, multiples in MULTIPLES if self.high <= ratio * self.low))


class Box(NamedTuple):
    """A part of the drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Box") -> bool:
        """Whether they have more than an edge in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, x_ticks: Mapping[float, str] | None = None
) -> Markup:
    """A line for each system; one point at least in all. `x_ticks` names values, instead of round numbers."""
    x, y = _scales(series)
    ticks = x_ticks or x.ticks()
    chart = _frame(f"{title}: lines of {_names(series)}", x, y, ticks, x_label, y_label)
    for each in series:
        group, points = _group(chart, each), each.known()
        places = [f"{x.place(across)} {y.place(up)}" for across, up in points]
        _line(group, each.system, "M" + "L".join(places) if places else "")
        every = math.ceil(len(points) / MOST_MARKERS)
        for number, ((across, up), place) in enumerate(zip(points, places, strict=True)):
            told = f"{each.name}\n{x_label}: {ticks.get(across, f'{across:.4g}')}\n{y_label}: {up:.2f}"
            _marker(group, each.system, place, "marker" if number % every == 0 else "marker quiet", told)
    return _markup(chart)


def scatter_chart(series: Sequence[Series], title: str, x_label: str, y_label: str, log_x: bool = False) -> Markup:
    """Points with their systems' names beside them; one at least in all."""
    x, y = _scales(series, RIGHT - ROOM, log_x)
    chart = _frame(f"{title}: points of {_names(series)}", x, y, x.ticks(), x_label, y_label)
    points = [(each, *point) for each in series for point in each.known()]
    names = [_short(each.name) for each, *_ in points]
    boxes = _beside([(x.place(across), y.place(up)) for _, across, up in points], names)
    for (each, across, up), name, box in zip(points, names, boxes, strict=True):
        group, place = _group(chart, each), (x.place(across), y.place(up))
        start, middle = box.left > place[0], (box.top + box.bottom) / 2
        edge = box.left if start else box.right
        if middle != place[1]:
            SubElement(group, "path", {"class": "leader", "d": f"M{place[0]} {place[1]}L{edge} {middle}"})
        told = f"{each.name}\n{x_label}: {across:.4g}\n{y_label}: {up:.2f}"
        _marker(group, each.system, f"{place[0]} {place[1]}", "marker", told)
        _text(group, name, edge, middle + 4, "start" if start else "end")
    return _markup(chart)


def key(system: int) -> Markup:
    """A piece of the system's line with its marker, for legends and tables."""
    picture = Element("svg", {"class": "key", "viewBox": "0 0 30 12", "aria-hidden": "true", "style": _colour(system)})
    _line(picture, system, "M1 6H29")
    _marker(picture, system, "15 6", "marker")
    return _markup(picture)


def _scales(series: Sequence[Series], right: float = RIGHT, log_x: bool = False) -> tuple[Scale, Scale]:
    points = [point for each in series for point in each.known()]
    across, up = ([point[axis] for point in points] for axis in (0, 1))
    return Scale.around(across, LEFT, right, log_x), Scale.around(up, BOTTOM, TOP)


def _frame(label: str, x: Scale, y: Scale, x_ticks: Mapping[float, str], x_label: str, y_label: str) -> Element:
    """The axes, with nothing in the plot yet."""
    chart = Element("svg", {"class": "chart", "viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria-label": label})
    _text(chart, y_label, 0, 12, "start", "axis")
    for value, text in y.ticks().items():
        SubElement(chart, "path", {"class": "grid", "d": f"M{LEFT} {y.place(value)}H{RIGHT}"})
        _text(chart, text, LEFT - 8, y.place(value) + 4, "end", "tick")
    SubElement(chart, "path", {"class": "base", "d": f"M{LEFT} {BOTTOM}H{RIGHT}"})
    ends = [-math.inf, -math.inf]  # of what stands in the two rows under the plot
    for value, text in sorted(x_ticks.items()):
        place, half = x.place(value), LETTER * len(text) / 2
        SubElement(chart, "path", {"class": "base", "d": f"M{place} {BOTTOM}v5"})
        for row, end in enumerate(ends):
            if place - half > end + LETTER:  # else in the other row, or where that is full, too, without its name
                _text(chart, text, place, BOTTOM + 18 + LINE * row, "middle", "tick")
                ends[row] = place + half
                break
    rows = sum(end > -math.inf for end in ends)
    _text(chart, x_label, (LEFT + RIGHT) / 2, BOTTOM + 24 + LINE * rows, "middle", "axis")
    return chart


def _beside(places: Sequence[tuple[float, float]], names: Sequence[str]) -> list[Box]:
    """Room for each name: right or left of its point, or as little above or below as it takes to be free."""
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    boxes = []
    for (x, y), name in zip(places, names, strict=True):
        width = LETTER * len(name)
        choices = [
            Box(left, y + shift - LINE / 2, left + width, y + shift + LINE / 2)
            for shift in sorted(range(-8 * LINE, 8 * LINE + 1, LINE // 3), key=abs)
            for left in (x + 9, x - 9 - width)
        ]
        inside = [box for box in choices if box.left >= LEFT and box.right <= WIDTH and 0 <= box.top <= BOTTOM - LINE]
        free = [box for box in inside if not any(box.overlaps(other) for other in taken)]
        boxes.append((free or inside or choices)[0])
        taken.append(boxes[-1])
    return boxes


def _names(series: Sequence[Series]) -> str:
    return ", ".join(each.name for each in series)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _colour(system: int) -> str:
    return f"--colour:var(--colour-{system % COLOURS})"


def _group(chart: Element, series: Series) -> Element:
    return SubElement(chart, "g", {"data-system": str(series.system), "style": _colour(series.system)})


def _line(parent: Element, system: int, path: str) -> None:
    dash = DASHES[system // COLOURS % len(DASHES)]
    SubElement(parent, "path", {"class": "line", "d": path, "stroke-dasharray": dash})


def _marker(parent: Element, system: int, place: str, kind: str, told: str = "") -> None:
    """`told` is what the pointer brings up."""
    shape = {"class": kind, "d": MARKERS[system % len(MARKERS)], "transform": f"translate({place})"}
    marker = SubElement(parent, "path", shape)
    if told:
        SubElement(marker, "title").text = told


def _text(parent: Element, text: str, x: float, y: float, anchor: str, kind: str = "name") -> None:
    place = {"class": kind, "x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
    SubElement(parent, "text", place).text = text


def _markup(element: Element) -> Markup:
    return Markup(tostring(element, encoding="unicode"))
