import re
from itertools import pairwise
from xml.etree.ElementTree import Element, fromstring

import pytest

from nmt.compare.chart import (
    BOTTOM,
    COLOURS,
    DASHES,
    HEIGHT,
    LEFT,
    MARKERS,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    Series,
    legend_key,
    line_chart,
    scatter_chart,
)

CURVES = [
    Series(0, "none", [(1.0, 5.5), (2.0, 9.0), (3.0, 8.0)]),
    Series(1, "bahdanau", [(1.0, 10.0), (2.0, 20.0), (3.0, None), (4.0, 31.5)]),
]


def of_class(chart: Element, name: str) -> list[Element]:
    return [each for each in chart.iter() if name in each.get("class", "").split()]


def places(element: Element) -> list[tuple[float, float]]:
    """What a line goes through, or where markers are."""
    given = element.get("d", "") if element.get("class") == "line" else element.get("transform", "")
    numbers = [float(number) for number in re.findall(r"[-\d.]+", given)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def lines(series: list[Series]) -> Element:
    return fromstring(line_chart(series, "Learning curves", "epoch", "BLEU"))


def scatter(series: list[Series]) -> Element:
    return fromstring(scatter_chart(series, "BLEU by time", "minutes", "BLEU", log_x=True))


def test_every_system_has_its_line_through_its_known_points() -> None:
    groups = [each for each in lines(CURVES).iter("g") if "data-system" in each.attrib]
    assert [group.get("data-system") for group in groups] == ["0", "1"]
    drawn = [places(of_class(group, "line")[0]) for group in groups]
    assert [len(line) for line in drawn] == [3, 3]
    for group, line in zip(groups, drawn, strict=True):
        assert [place for marker in of_class(group, "marker") for place in places(marker)] == line
    assert drawn[0][0][0] == drawn[1][0][0] < drawn[0][1][0] == drawn[1][1][0] < drawn[0][2][0] < drawn[1][2][0]
    values = [y for each in CURVES for _, y in each.complete_points()]
    heights = [y for line in drawn for _, y in line]
    assert sorted(heights, reverse=True) == [height for _, height in sorted(zip(values, heights, strict=True))]
    assert all(LEFT < x < RIGHT and TOP < y < BOTTOM for line in drawn for x, y in line)


def test_a_point_tells_its_values() -> None:
    chart = fromstring(line_chart(CURVES, "BLEU by length", "words", "BLEU", {1.0: "4–9", 2.0: "10–12"}))  # noqa: RUF001
    told = [title.text for title in chart.iter("title")]
    assert told[0] == "none\nwords: 4–9\nBLEU: 5.50"  # noqa: RUF001
    assert told[-1] == "bahdanau\nwords: 4\nBLEU: 31.50"
    shown = [tick.text for tick in of_class(chart, "tick")]
    assert {"4–9", "10–12"} < set(shown)  # noqa: RUF001


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[3.3, 5.8], [0.5, 90.0], [1.0, 1e6], [36.1, 36.4], [7.0], [7.0, 7.0], [1e-3, 2e-3]])
def test_a_scale_has_round_ticks_and_keeps_the_order(values: list[float], log: bool) -> None:
    scale = Scale.around(values, LEFT, RIGHT, log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 12
    assert [float(text) for text in ticks.values()] == pytest.approx(list(ticks))
    drawn = [scale.position(value) for value in sorted([*ticks, *values])]
    assert drawn == sorted(drawn)
    assert LEFT <= drawn[0] <= drawn[-1] <= RIGHT
    assert scale.position(min(values)) > LEFT
    assert scale.position(max(values)) < RIGHT
    middle = (values[0] * values[-1]) ** 0.5 if log else (values[0] + values[-1]) / 2
    assert scale.position(middle) == pytest.approx((LEFT + RIGHT) / 2, abs=0.1)


@pytest.mark.parametrize("points", [[(1.0, 20.0)], [(1.0, 20.0), (2.0, 20.0)], [(None, 1.0), (3.0, 4.0), (2.0, None)]])
def test_few_or_equal_values(points: list[tuple[float | None, float | None]]) -> None:
    known = [point for point in points if None not in point]
    for chart in (lines([Series(0, "a", points)]), scatter([Series(0, "a", points)])):
        markers = of_class(chart, "marker")
        assert len(markers) == len(known)
        assert all(LEFT < x < RIGHT and TOP < y < BOTTOM for marker in markers for x, y in places(marker))


def test_charts_with_the_same_values_on_the_y_axis_have_the_same_axis() -> None:
    values = [0.1, 40.0]
    charts = [fromstring(line_chart([each], "t", "x", "y", y_values=values)) for each in CURVES]
    ticks = [
        [(text.text, text.get("y")) for text in of_class(chart, "tick") if text.get("x") == "36"] for chart in charts
    ]
    assert ticks[0] == ticks[1]
    assert len(ticks[0]) > 3
    alone = of_class(lines(CURVES[:1]), "tick")
    assert [(text.text, text.get("y")) for text in alone if text.get("x") == "36"] != ticks[0]


def test_a_system_without_points_is_in_the_order_of_colours_all_the_same() -> None:
    chart = lines([Series(0, "a", []), *CURVES[1:]])
    assert [len(of_class(group, "marker")) for group in chart.iter("g")] == [0, 3]
    assert chart.findall("g")[1].get("style") == "--colour:var(--colour-1)"


def test_a_long_line_shows_few_of_its_markers() -> None:
    chart = lines([Series(0, "a", [(float(x), float(x)) for x in range(100)])])
    assert len(of_class(chart, "marker")) == 100
    assert 8 <= 100 - len(of_class(chart, "quiet")) <= 12


def test_names_are_not_markup_and_describe_the_chart() -> None:
    name = "<b a='1'>&\"</b>"
    for chart in (lines([Series(0, name, [(1.0, 2.0)])]), scatter([Series(0, name, [(1.0, 2.0)])])):
        assert not list(chart.iter("b"))
        assert chart.get("role") == "img"
        assert name in chart.get("aria-label", "")


def test_labels_of_the_axis_do_not_touch() -> None:
    ticks = {10.0 + 0.1 * number: f"{number}{number}" for number in range(9)} | {30.0: "30"}
    series = [Series(0, "a", [(x, 1.0) for x in ticks])]
    shown = of_class(fromstring(line_chart(series, "title", "words", "BLEU", ticks)), "tick")
    rows: dict[str, list[float]] = {}
    for tick in shown:
        if tick.get("text-anchor") == "middle":
            rows.setdefault(tick.get("y", ""), []).append(float(tick.get("x", "")))
    assert len(rows) == 2
    assert all(right - left > 15 for row in rows.values() for left, right in pairwise(row))


def test_names_in_a_crowd_stay_apart() -> None:
    crowd = [Series(number, f"system_{number}", [(100.0 + 8 * number, 30 - 0.2 * number)]) for number in range(20)]
    crowd += [Series(20, "a" * 60, [(150.0, 29.0)])]
    chart = scatter(crowd)
    boxes = []
    for text in of_class(chart, "name"):
        width, start = 7 * len(text.text or ""), text.get("text-anchor") == "start"
        left = float(text.get("x", "")) - (0 if start else width)
        boxes.append((left, left + width, float(text.get("y", ""))))
    assert len(boxes) == 21
    assert all(left >= 0 and right <= WIDTH and 0 < y < HEIGHT for left, right, y in boxes)
    for number, (left, right, y) in enumerate(boxes):
        assert not [box for box in boxes[:number] if box[0] < right and left < box[1] and abs(box[2] - y) < 12]


def test_twenty_systems_are_told_apart_with_and_without_lines() -> None:
    keys = [fromstring(legend_key(system)) for system in range(20)]
    colours = [each.get("style") for each in keys]
    dashes = [of_class(each, "line")[0].get("stroke-dasharray") for each in keys]
    markers = [of_class(each, "marker")[0].get("d") for each in keys]
    assert len(set(zip(colours, dashes, strict=True))) == len(set(zip(colours, markers, strict=True))) == 20
    assert (len(set(colours)), len(set(dashes)), len(set(markers))) == (COLOURS, len(DASHES), len(MARKERS))


def test_a_long_name_loses_its_sections_first() -> None:
    names = [
        "attention/alignment=posterior",
        "luong_dot",
        "x encoder.recurrent_dropout=0.1",
        "x decoder.recurrent_dropout=0.1",
    ]
    chart = scatter_chart([Series(n, name, [(1.0 + n, 2.0 + n)]) for n, name in enumerate(names)], "t", "x", "y")
    assert ">alignment=posterior<" in chart
    assert ">luong_dot<" in chart
    assert ">x encoder.recurrent_dro…<" in chart
    assert ">x decoder.recurrent_dro…<" in chart
