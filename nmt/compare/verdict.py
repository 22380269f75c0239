"""Whether a statement of a paper holds for the runs compared here: the one rule behind every verdict.

A statement is a number that one seed's runs give, such as a difference in BLEU, and a limit that it exceeds if the
statement holds. The runs of one seed are a pair: only seeds that all models of the statement have are used.

- Two seeds or more: the 95 % interval of the mean over the seeds, by Student's t. Reproduced if it lies above the
  limit, not reproduced if it lies below, undecided if it contains the limit.
- One seed: undecided, except for a plain difference in BLEU with p < 0.05 both in paired bootstrap resampling and in
  paired approximate randomisation: then its sign decides.
- Without runs of one of its models: undecided.

A finding is reproduced if all its statements are, not reproduced if one of them is not, and else undecided. No
correction for the number of statements is applied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from nmt.compare.page import SIGNIFICANT
from nmt.evaluate.bleu import Counts
from nmt.evaluate.student import mean_interval

RULE = (
    "Each number is measured once per seed, on the runs of that seed. With two or more seeds, a statement is "
    "reproduced if the 95 % interval of the mean over the seeds (Student's t) lies above its limit, not reproduced if "
    "the interval lies below, and undecided if it contains the limit, which is 0 unless stated. With one seed it is "
    "undecided, unless it is a plain difference in BLEU that both paired tests find significant (p < 0.05). A finding "
    "is reproduced if all its statements are, not reproduced if one of them is not, and else undecided. The intervals "
    "are not corrected for the number of statements."
)


class Verdict(StrEnum):
    """The outcome of a check, in the words of the report."""

    REPRODUCED = "reproduced here"
    CONTRADICTED = "not reproduced"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Scores:
    """What a run is judged by."""

    bleu: float
    by_length: Sequence[Mapping[str, Any]] = ()  # of score_by_length
    counts: Counts = field(default_factory=lambda: np.zeros((0, 10), np.int64))  # of BLEU by sentence, (N, 10)


@dataclass(frozen=True)
class Measured:
    """The runs of each model of a finding by seed, and for a model without runs the reason."""

    runs: Mapping[str, Mapping[int, Scores]]
    problems: Mapping[str, str]
    p_value: Callable[[Counts, Counts], float] | None = None  # the larger one of both paired tests


@dataclass(frozen=True)
class Statement:
    """Something that a paper found about some of its models."""

    text: str
    published: str  # the paper's figures, or where it says so
    models: tuple[str, ...]
    value: Callable[..., float | None]  # of the Scores of these models; None if they do not suffice
    unit: str = "BLEU"
    above: float = 0.0  # the limit


@dataclass(frozen=True)
class Check:
    """A statement with what was measured here; `low` and `high` are the ends of the 95 % interval."""

    text: str
    published: str
    unit: str
    above: float
    value: float | None
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    verdict: Verdict
    reason: str


def difference(better: Scores, worse: Scores) -> float:
    """BLEU of the first minus BLEU of the second."""
    return better.bleu - worse.bleu


def judge(statement: Statement, measured: Measured) -> Check:
    """Measure a statement and decide by the rule above."""
    by_seed = [measured.runs.get(model, {}) for model in statement.models]
    seeds = tuple(sorted(set.intersection(*(set(runs) for runs in by_seed))))
    scores = [[runs[seed] for runs in by_seed] for seed in seeds]
    values = [number for each in scores if (number := statement.value(*each)) is not None]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    verdict = Verdict.UNDECIDED
    if problems := [measured.problems[model] for model in statement.models if model in measured.problems]:
        reason = "; ".join(problems)
    elif not seeds:
        reason = f"no seed has runs of all of {', '.join(statement.models)}"
    elif len(values) < len(seeds):
        reason = "the test set has too few sentences of different lengths, or a BLEU of 0"
    elif len(values) == 1:
        (value,) = values
        verdict, reason = _of_one_seed(statement, scores[0], value, measured)
    else:
        value, low, high = mean_interval(values)
        verdict, reason = _of_interval(low, high, statement.above)
    absent = [
        f"{model} has no finished run with seed {seed}"
        for model, runs in zip(statement.models, by_seed, strict=True)
        for seed in sorted(set().union(*by_seed) - set(runs))
        if model not in measured.problems
    ]
    return Check(
        text=statement.text,
        published=statement.published,
        unit=statement.unit,
        above=statement.above,
        value=value,
        low=low,
        high=high,
        seeds=seeds,
        verdict=verdict,
        reason="; ".join([reason, *absent]),
    )


def _of_interval(low: float, high: float, limit: float) -> tuple[Verdict, str]:
    if low > limit:
        return Verdict.REPRODUCED, f"the interval lies above {limit:g}"
    if high < limit:
        return Verdict.CONTRADICTED, f"the interval lies below {limit:g}"
    return Verdict.UNDECIDED, f"the interval contains {limit:g}"


def _of_one_seed(
    statement: Statement, scores: Sequence[Scores], value: float, measured: Measured
) -> tuple[Verdict, str]:
    if statement.value is not difference or statement.above or measured.p_value is None:
        return Verdict.UNDECIDED, "one seed gives no interval"
    p = measured.p_value(*(each.counts for each in scores))
    if p >= SIGNIFICANT:
        return Verdict.UNDECIDED, f"one seed, and the paired tests find no significant difference (p = {p:.3f})"
    reason = f"one seed, but both paired tests find the difference significant (p = {p:.3f})"
    return (Verdict.REPRODUCED if value > 0 else Verdict.CONTRADICTED), reason


def overall(checks: Iterable[Check]) -> Verdict:
    """The verdict on a finding."""
    verdicts = {check.verdict for check in checks}
    if Verdict.CONTRADICTED in verdicts:
        return Verdict.CONTRADICTED
    return Verdict.REPRODUCED if verdicts == {Verdict.REPRODUCED} else Verdict.UNDECIDED
