"""When a statement is reproduced, not reproduced or undecided, on made-up scores."""

from collections.abc import Sequence

import pytest

from nmt.compare.verdict import Check, Measured, Scores, Statement, Verdict, difference, judge, overall

STATEMENT = Statement("a beats b", "3 against 2", ("a", "b"), difference)
MARGIN = Statement("a is close to b", "", ("a", "b"), difference, above=-5.0)


def measured(a: dict[int, float], b: dict[int, float] | str, p: float = 1.0) -> Measured:
    """A text in place of b's scores is the reason why there are none."""
    runs = {"a": {seed: Scores(bleu) for seed, bleu in a.items()}}
    if isinstance(b, str):
        return Measured(runs, {"b": b}, lambda *_: p)
    return Measured(runs | {"b": {seed: Scores(bleu) for seed, bleu in b.items()}}, {}, lambda *_: p)


def seeds(scores: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(scores, 1))


@pytest.mark.parametrize(
    ("a", "b", "statement", "verdict"),
    [
        ([30, 31, 32], [20, 21.5, 21.5], STATEMENT, Verdict.REPRODUCED),
        ([20, 21.5, 21.5], [30, 31, 32], STATEMENT, Verdict.CONTRADICTED),
        ([30, 20, 31], [20, 30, 20], STATEMENT, Verdict.UNDECIDED),
        ([30, 30, 30], [30, 30, 30], STATEMENT, Verdict.UNDECIDED),  # an interval of no width holds its limit
        ([29, 30.1, 31], [30, 31, 32], MARGIN, Verdict.REPRODUCED),  # a little worse, and close
        ([20, 21, 22.5], [30, 31, 32], MARGIN, Verdict.CONTRADICTED),
        ([25, 26, 27.5], [30, 31, 32], MARGIN, Verdict.UNDECIDED),
    ],
)
def test_the_interval_over_seeds_decides(
    a: list[float], b: list[float], statement: Statement, verdict: Verdict
) -> None:
    check = judge(statement, measured(seeds(a), seeds(b)))
    assert check.verdict == verdict
    assert check.low is not None
    assert check.high is not None
    assert check.value == pytest.approx((sum(a) - sum(b)) / 3)
    assert check.low <= check.value <= check.high
    assert check.seeds == (1, 2, 3)
    assert f"{statement.above:g}" in check.reason


def test_runs_are_paired_by_seed_not_by_order() -> None:
    """Both vary by ten BLEU over the seeds, their difference by a tenth."""
    a, b = {3: 41.0, 1: 21.1, 2: 31.0}, {1: 20.0, 2: 30.0, 3: 40.0}
    assert judge(STATEMENT, measured(a, b)).verdict == Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("p", "a", "verdict"),
    [(0.049, 31, Verdict.REPRODUCED), (0.049, 29, Verdict.CONTRADICTED), (0.05, 60, Verdict.UNDECIDED)],
)
def test_one_seed_is_decided_by_the_paired_tests_alone(p: float, a: float, verdict: Verdict) -> None:
    check = judge(STATEMENT, measured({4: a}, {4: 30.0}, p))
    assert (check.verdict, check.low, check.high, check.seeds) == (verdict, None, None, (4,))
    assert check.value == a - 30
    assert f"p = {p:.3f}" in check.reason


def test_the_paired_tests_say_nothing_about_other_numbers_than_a_difference() -> None:
    for statement in (MARGIN, Statement("", "", ("a", "b"), lambda a, b: a.bleu / b.bleu)):
        check = judge(statement, measured({1: 90.0}, {1: 30.0}, p=0.001))
        assert (check.verdict, check.reason) == (Verdict.UNDECIDED, "one seed gives no interval")


def test_what_lacks_runs_is_undecided_and_says_which() -> None:
    check = judge(STATEMENT, measured(seeds([30, 31, 32]), "no finished run with attention=b"))
    assert (check.verdict, check.value, check.low) == (Verdict.UNDECIDED, None, None)
    assert check.reason == "no finished run with attention=b"
    check = judge(STATEMENT, measured({1: 30.0}, {2: 20.0}, p=0.001))
    assert check.verdict == Verdict.UNDECIDED
    assert check.reason.startswith("no seed has runs of all of a, b")


def test_a_seed_that_one_model_lacks_is_left_out_and_named() -> None:
    check = judge(STATEMENT, measured({1: 30.0, 2: 31.0, 3: 0.0}, {1: 20.0, 2: 21.1}))
    assert (check.verdict, check.seeds) == (Verdict.REPRODUCED, (1, 2))
    assert check.reason == "the interval lies above 0; b has no finished run with seed 3"


def test_a_number_that_cannot_be_measured_is_undecided() -> None:
    unknown = Statement("", "", ("a", "b"), lambda a, b: None if a.bleu > 31 else a.bleu - b.bleu)
    check = judge(unknown, measured(seeds([30, 31, 32]), seeds([20, 21, 22])))
    assert (check.verdict, check.value) == (Verdict.UNDECIDED, None)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([Verdict.REPRODUCED, Verdict.REPRODUCED], Verdict.REPRODUCED),
        ([Verdict.REPRODUCED, Verdict.UNDECIDED], Verdict.UNDECIDED),
        ([Verdict.REPRODUCED, Verdict.UNDECIDED, Verdict.CONTRADICTED], Verdict.CONTRADICTED),
    ],
)
def test_a_finding_is_its_statements(verdicts: list[Verdict], expected: Verdict) -> None:
    checks = [Check("", "", "", 0.0, None, None, None, (), verdict, "") for verdict in verdicts]
    assert overall(checks) == expected
