import re

from hypothesis import given
from hypothesis import strategies as st

from nmt.system.text_table import Column, decimals, human_count, human_duration, markdown, terminal

COLUMNS = [
    Column("rank", "rank"),
    Column("run", "run"),
    Column("bleu", "BLEU", decimals(2)),
    Column("chrf", "chrF", decimals(1)),
    Column("parameters", "parameters", human_count),
    Column("seconds", "training time", human_duration),
]
ROWS = [
    {"rank": 1, "run": "luong_dot", "bleu": 31.256, "chrf": 55.04, "parameters": 12_345_678, "seconds": 3780.0},
    {"rank": 12, "run": "1e5", "bleu": 9.5, "chrf": None, "parameters": 950, "seconds": 252.0},
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_both_formats_have_the_same_cells_and_align_numbers_to_the_right() -> None:
    heading, rule, *rows = markdown(ROWS, COLUMNS).splitlines()
    assert cells(heading) == [column.heading for column in COLUMNS]
    assert [cell[-1] for cell in cells(rule)] == [":", "-", ":", ":", ":", ":"]  # a final ":" aligns to the right
    assert [cells(row) for row in rows] == [
        ["1", "luong_dot", "31.26", "55.0", "12.3 M", "1 h 03 min"],
        ["12", "1e5", "9.50", "-", "950", "4 min 12 s"],
    ]
    lines = terminal(ROWS, COLUMNS).splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[2:]] == [cells(row) for row in rows]
    first, second = (line.index(bleu) + len(bleu) for line, bleu in zip(lines[2:], ("31.26", "9.50"), strict=True))
    assert first == second == lines[0].index("BLEU") + 4
    assert lines[2].index("luong_dot") == lines[3].index("1e5")
    assert markdown([{"run": "a|b\\|c\nd"}], COLUMNS[1:2]).splitlines()[2] == "| a\\|b\\\\\\|c d |"


@given(st.integers(0, 10**12 - 10**9))
def test_human_count_is_within_half_of_its_last_digit(count: int) -> None:
    number, _, unit = human_count(count).partition(" ")
    size = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}[unit]
    assert abs(float(number) * size - count) <= 0.0500001 * size
    assert float(number) < 1000


@given(st.floats(0, 1e7))
def test_human_duration_is_within_half_of_its_smaller_unit(seconds: float) -> None:
    shown = human_duration(seconds)
    seconds_of = {"h": 3600, "min": 60, "s": 1}
    parts = re.findall(r"(\d+) (h|min|s)", shown)
    assert abs(sum(int(number) * seconds_of[unit] for number, unit in parts) - seconds) <= seconds_of[parts[-1][1]] / 2
    assert all(int(number) < 60 for number, unit in parts if unit != "h")
