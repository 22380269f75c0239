"""Pictures of a comparison: positions of what is drawn, and no overlaps."""

import re
from itertools import combinations
from xml.etree.ElementTree import fromstring

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text
from test_page import comparison, system

from nmt.compare.pictures import THEME, Picture, draw, pareto_front


def many(count: int) -> dict[str, Picture]:
    rng, systems = np.random.default_rng(0), [system(count, "none", bleu=14.0, difference=-22.0, cost_seconds=290.0)]
    for rank in range(count - 1, 0, -1):
        scores = {"bleu": 36 - rank * 0.1, "difference": -rank * 0.1, "cost_seconds": 300 * rng.uniform(1, 2)}
        systems.insert(0, system(rank, f"attention_{rank}", **scores))
    return draw(comparison(systems=systems, baseline="another"))


def test_each_subject_has_a_picture_if_its_values_are_known() -> None:
    assert many(3).keys() == {"differences", "cost", "curves", "length"}
    bare = [{**row, "curve": [], "by_length": [], "cost_seconds": None} for row in comparison()["systems"]]
    assert draw(comparison(systems=bare)).keys() == {"differences"}


def test_names_do_not_overlap() -> None:
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        for subject, picture in many(28).items():
            picture.figure.draw_without_rendering()
            texts = picture.figure.findobj(Text)
            names = [text for text in texts if re.match(r"\d+ (attention_|none)", text.get_text())]
            assert len(names) == 28, subject
            boxes = [name.get_window_extent().padded(-1) for name in names]
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
    assert "28 (14.00 ↓)" in [text.get_text() for text in pictures["cost"].figure.findobj(Text)]


def test_lines_go_through_the_validations_in_minutes_on_a_logarithmic_axis() -> None:
    axes = draw(comparison())["curves"].figure.axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "training time, minutes (logarithmic)"
    (line,) = [line for line in axes.lines if line.get_gid() == "system-0-line"]
    assert line.get_xdata() == pytest.approx([91 / 60, 181 / 60])
    assert line.get_ydata() == pytest.approx([9.0, 19.0])


def test_the_page_has_them_in_its_colours_with_hints_by_system() -> None:
    text = str(many(8)["curves"].inline())
    root = fromstring(text)
    assert not [colour for colour in THEME.values() if colour in text]
    assert all(f"var(--{name})" in text for name in ("muted", "colour-0", "colour-5"))
    assert {part.get("data-system") for part in root.iter() if part.get("data-system")} == set("01234567")
    hints = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "1 attention_1\ntraining time, minutes: 1.517\nvalidation BLEU: 9" in hints
    assert len(hints) == 16


def test_the_front_is_what_nothing_cheaper_beats() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 6.0), (4.0, 9.0), (1.0, 5.0)]
    assert pareto_front(points) == {0, 2, 4}


@pytest.mark.parametrize("ends", [(8.0, 12.7), (75.0, 95.0), (31.0, 39.0), (2.0, 900.0), (3.0, 3.0)])
def test_a_logarithmic_axis_has_ticks_to_read_times_from(ends: tuple[float, float]) -> None:
    rows = [system(rank, name, cost_seconds=60 * end) for rank, (name, end) in enumerate(zip("ab", ends, strict=True))]
    axes = draw(comparison(systems=rows))["cost"].figure.axes[0]
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2 + (ends[0] != ends[1])


def test_the_figures_of_a_metric_have_its_decimals(mean_metric: str) -> None:
    rows = [system(rank, f"s{rank}", mean=0.83 + rank / 1000, mean_ci=0.01, cost_seconds=60.0) for rank in range(2)]
    hints = draw(comparison(systems=rows, metric=mean_metric))["cost"].hints.values()
    assert [texts[0].splitlines()[-1] for texts in hints] == ["mean score: 0.8300", "mean score: 0.8310"]
