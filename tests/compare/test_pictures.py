"""Pictures of a comparison: positions of what is drawn, and no overlaps."""

from itertools import combinations
from xml.etree.ElementTree import fromstring

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text
from test_page import comparison, system

from nmt.compare.pictures import THEME, Picture, draw, pareto_front, short_names, spread_apart


def many(count: int) -> dict[str, Picture]:
    rng = np.random.default_rng(0)
    systems = [
        system(
            rank,
            f"attention_{rank}",
            bleu=36 - rank * 0.1,
            difference=-rank * 0.1,
            cost_seconds=300 * rng.uniform(1, 2),
        )
        for rank in range(1, count)
    ]
    systems.append(system(count, "none", bleu=14.0, difference=-22.0, cost_seconds=290.0))
    return draw(comparison(systems=systems, baseline="another"))


def test_each_subject_has_a_picture_if_its_values_are_known() -> None:
    assert many(3).keys() == {"differences", "cost", "curves", "length"}
    bare = [{**row, "curve": [], "by_length": [], "cost_seconds": None} for row in comparison()["systems"]]
    assert draw(comparison(systems=bare)).keys() == {"differences"}


def test_names_do_not_overlap() -> None:
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        for subject, picture in many(28).items():
            picture.figure.draw_without_rendering()
            names = [
                text for text in picture.figure.findobj(Text) if text.get_text().startswith(("attention_", "none"))
            ]
            assert len(names) == 28, subject
            boxes = [Text.get_window_extent(name).padded(-1) for name in names]  # without lines to the points
            assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])], subject
            width, height = picture.figure.bbox.size
            assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes), subject


def test_a_system_far_from_all_others_stands_at_the_edge_with_its_value() -> None:
    pictures = many(28)
    low, high = pictures["differences"].figure.axes[0].get_xlim()
    assert -5 < low < -2.8
    assert high < 2
    texts = [text.get_text() for text in pictures["differences"].figure.findobj(Text)]
    assert "-22.00 ± 0.75 *" in texts
    assert "none (14.00 ↓)" in [text.get_text() for text in pictures["cost"].figure.findobj(Text)]


def test_lines_go_through_the_validations_in_minutes_on_a_logarithmic_axis() -> None:
    axes = draw(comparison())["curves"].figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "training time, minutes (logarithmic)"
    (line,) = [line for line in axes.lines if line.get_gid() == "system-0-line"]
    assert line.get_xdata() == pytest.approx([91 / 60, 181 / 60])
    assert line.get_ydata() == pytest.approx([9.0, 19.0])


def test_the_page_has_them_in_its_colours_with_hints_by_system() -> None:
    root = fromstring(str(many(8)["curves"].inline()))
    text = str(many(8)["curves"].inline())
    assert not [colour for colour in THEME.values() if colour in text]
    assert all(f"var(--{name})" in text for name in ("muted", "colour-0", "colour-5"))
    assert {part.get("data-system") for part in root.iter() if part.get("data-system")} == set("01234567")
    hints = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "attention_1\ntraining time, minutes: 1.517\nvalidation BLEU: 9" in hints
    assert len(hints) == 16


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.001, 0.05))
def test_places_keep_their_order_and_distance_and_move_no_more_than_needed(values: list[float], gap: float) -> None:
    places = spread_apart(values, gap)
    order = np.argsort(values, kind="stable")
    assert (np.diff(np.array(places)[order]) >= gap - 1e-9).all()
    assert min(places) >= -1e-9
    assert max(places) <= 1 + 1e-9
    if len(values) > 1 and np.diff(np.sort(values)).min() >= gap:
        assert places == pytest.approx(values)


def test_the_front_is_what_nothing_cheaper_beats() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 6.0), (4.0, 9.0), (1.0, 5.0)]
    assert pareto_front(points) == {0, 2, 4}


def test_a_long_name_loses_its_sections_first() -> None:
    names = ["attention/alignment=posterior_of_all", "luong_dot", "x encoder.recurrent_dropout=0.1234"]
    names.append("x decoder.recurrent_dropout=0.1234")
    assert short_names(names) == [
        "alignment=posterior_of_all",
        "luong_dot",
        "x encoder.recurrent_dropout=0…",
        "x decoder.recurrent_dropout=0…",
    ]


def test_long_names_stay_different() -> None:
    starts = "a" * 40
    names = [f"{starts} seed=1", f"{starts} seed=2", f"b{starts}c", f"b{starts}dc"]
    labels = short_names([*names, "entmax decoder.dropout=0.1 encoder.dropout=0.2"])
    assert labels[:2] == [f"…{'a' * 22} seed={number}" for number in (1, 2)]
    assert labels[2:4] == [f"…{name[-29:]}" for name in names[2:]]
    assert labels[4] == "entmax decoder.dropout=0.1 en…"  # two keys `dropout` would not tell what differs
    middle = [f"{starts}{digit}{starts}" for digit in "12"]
    assert short_names(middle) == [f"{'a' * 24}… (1)", f"{'a' * 24}… (2)"]
    assert all(len(label) <= 30 for label in labels)


@pytest.mark.parametrize("ends", [(8.0, 12.7), (75.0, 95.0), (31.0, 39.0), (2.0, 900.0), (3.0, 3.0)])
def test_a_logarithmic_axis_has_ticks_to_read_times_from(ends: tuple[float, float]) -> None:
    rows = [system(rank, name, cost_seconds=60 * end) for rank, (name, end) in enumerate(zip("ab", ends, strict=True))]
    axes = draw(comparison(systems=rows))["cost"].figure.axes[0]
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2 + (ends[0] != ends[1])


def test_the_note_of_the_front_covers_no_name() -> None:
    rows = [system(rank, f"attention_{rank}", bleu=20.0 + rank, cost_seconds=500 + 9 * rank) for rank in range(12)]
    rows.append(system(12, "slow", bleu=20.1, cost_seconds=700))
    figure = draw(comparison(systems=rows))["cost"].figure
    figure.draw_without_rendering()
    texts = {text.get_text(): Text.get_window_extent(text).padded(-1) for text in figure.findobj(Text)}
    note = texts["line: Pareto front, filled points"]
    assert not [name for name, box in texts.items() if name in {row["name"] for row in rows} and box.overlaps(note)]


def test_the_figures_of_a_metric_have_its_decimals(mean_metric: str) -> None:
    rows = [system(rank, f"s{rank}", mean=0.83 + rank / 1000, mean_ci=0.01, cost_seconds=60.0) for rank in range(3)]
    pictures = draw(comparison(systems=rows, metric=mean_metric))
    assert [hints[0].splitlines()[-1] for hints in pictures["cost"].hints.values()] == [
        *("mean score: 0.8300", "mean score: 0.8310", "mean score: 0.8320")
    ]


def test_characters_of_chinese_are_wider_than_letters() -> None:
    widths = [
        draw(comparison(systems=[system(0, name)]))["length"].figure.axes[0].get_position().x0
        for name in ("模型的名字很长", "abcdefg")
    ]
    assert widths[0] > 1.4 * widths[1]


def test_times_too_short_to_measure_leave_the_curves_over_epochs() -> None:
    rows = [{**row, "curve": [{**point, "seconds": 0.0} for point in row["curve"]]} for row in comparison()["systems"]]
    pictures = draw({**comparison(), "systems": [{**row, "cost_seconds": 0.0} for row in rows]})
    assert "cost" not in pictures
    assert pictures["curves"].figure.axes[0].get_xlabel() == "epoch"
