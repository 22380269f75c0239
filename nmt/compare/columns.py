"""The columns of a comparison's tables, and the text of their cells, for the terminal, Markdown and the page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nmt.compare.compare import SIGNIFICANT, Comparison
from nmt.evaluate.metrics import METRICS, sign_of
from nmt.system.text_table import Column, decimals, human_count, human_duration

Row = Mapping[str, Any]
SPEEDS = ("tokens_per_second", "sentences_per_second")
OF_METRIC = ("longest", "equal_updates", "equal_time")  # scores by the metric that ranks
IN_FULL = {  # keys of columns that only the full table shows, not the table on the terminal
    *(f"{name}_sd" for name in METRICS),
    *("detectable", "seeds_needed", "p_stratified", "perplexity", "seconds", *SPEEDS, *OF_METRIC),
}
LEAST_P = 0.0001


@dataclass(frozen=True)
class Cell:
    """A table cell; `value` is its sort key, or None if the cell has no value."""

    text: str
    value: object
    spread: str | None = None  # the number after ±
    significant: bool = False

    def __str__(self) -> str:
        """Format the cell as one text: the value, with ± and the spread if there is one."""
        return self.text if self.spread is None else f"{self.text} ± {self.spread}"


def cell(row: Row, column: Column, metric: str) -> Cell | None:
    """Format a value of a row with its spread, which stands after ±; None if there is no value.

    The spread of the metric that ranks, of a difference and of a single run's score is half the width of the 95 %
    interval. The spread of any other mean is the standard deviation over seeds.
    """
    value = row.get(column.key)
    if value is None:
        return None
    interval = row.get(f"{column.key}_ci")
    spread = interval if column.key == metric else row.get(f"{column.key}_sd", interval)
    sort_key = value if isinstance(value, int | float) else column.show(value)
    show_spread = column.show if column.key != "difference" else score_decimals(metric)
    return Cell(
        column.show(value),
        sort_key,
        None if spread is None else show_spread(spread),
        column.key == "p" and value < SIGNIFICANT,
    )


def with_values(columns: Iterable[Column], rows: Sequence[Row]) -> list[Column]:
    """Keep the columns that have a value in at least one row."""
    return [column for column in columns if any(row.get(column.key) is not None for row in rows)]


def system_columns(comparison: Comparison) -> list[Column]:
    """List the columns of the ranked table of systems, without empty columns."""
    metric, budget, rows = comparison["metric"], comparison["budget"], comparison["systems"]
    words = "-".join(map(str, dict.fromkeys(rows[0]["longest_words"])))
    updates, seconds, heading = budget["updates"] or 0, budget["seconds"] or 0, METRICS[metric].heading
    difference, p, *details = _test_columns(metric)
    columns = [
        Column("rank", "#"),
        Column("name", "system"),
        Column("seeds", "seeds", lambda seeds: str(len(seeds) or "-")),
        Column(metric, heading, score_decimals(metric)),
        Column("letters", "groups"),
        difference,
        p,
        *(column for column in _score_columns(comparison) if column.key != metric),
        Column("aer", "AER %", decimals(1)),
        Column("longest", f"{heading}, {words} words", score_decimals(metric)),
        Column("perplexity", "validation perplexity", decimals(2)),
        Column("equal_updates", f"validation {heading}, {updates:,} updates", score_decimals(metric)),
        Column("equal_time", f"validation {heading}, {human_duration(seconds)}", score_decimals(metric)),
        Column("parameters", "parameters", human_count),
        Column("update_milliseconds", "ms/update", decimals(0)),
        Column("sentences_per_second", "sentences/s, search", "{:,.0f}".format),
        Column("tokens_per_second", "tokens/s, training", "{:,.0f}".format),
        Column("seconds", "training time", human_duration),
        *details,
        Column(f"{metric}_sd", "sd of seeds", score_decimals(metric)),
    ]
    return with_values(columns, rows)


def difference_columns(comparison: Comparison) -> list[Column]:
    """List the columns of the table of tested pairs of systems."""
    columns = [Column("system", "system"), Column("baseline", "from"), *_test_columns(comparison["metric"])]
    return with_values(columns, comparison["differences"])


def run_columns(comparison: Comparison) -> list[Column]:
    """List the columns of the table of single runs."""
    machine = [Column("machine", "machine")] if len(comparison["machines"]) > 1 else []
    columns = [
        Column("run", "run"),
        Column("system", "system"),
        Column("seed", "seed"),
        *_score_columns(comparison),
        Column("aer", "AER %", decimals(1)),
        Column("p_bootstrap", "p, bootstrap", p_value),
        Column("p_randomisation", "p, randomisation", p_value),
        Column("baseline_run", "compared with"),
        *machine,
    ]
    return with_values(columns, comparison["runs"])


def _score_columns(comparison: Comparison) -> list[Column]:
    return [Column(name, METRICS[name].heading, score_decimals(name)) for name in comparison["signatures"]]


def _test_columns(metric: str) -> list[Column]:
    show = score_decimals(metric)
    return [
        Column("difference", "difference", lambda value: f"{'' if value < 0 else '+'}{show(value)}"),
        Column("p", "p", p_value),
        Column("p_raw", "raw p", p_value),
        Column("p_stratified", "p, stratified", p_value),
        Column("detectable", "detects", show),
        Column("seeds_needed", "seeds needed", lambda count: "inf" if math.isinf(count) else str(count)),
    ]


def score_decimals(metric: str) -> Callable[[float], str]:
    """Return a formatter of scores and of differences between them."""
    return decimals(METRICS[metric].decimals)


def p_value(p: float) -> str:
    """Format a p value with four decimals; a smaller one as <0.0001."""
    return f"{p:.4f}" if p >= LEAST_P else f"<{LEAST_P}"


def power(comparison: Comparison) -> str:
    """Describe how large a difference these seeds and sentences can detect; empty if no score varies."""
    rows, name = comparison["differences"], METRICS[comparison["metric"]].heading
    show, sizes = score_decimals(comparison["metric"]), [row["detectable"] for row in rows]
    if not any(sizes):  # there is no pair of systems, or all outputs are equal
        return ""
    spread = f" (the median; {show(min(sizes))} to {show(max(sizes))})" if len(sizes) > 1 else ""
    base = "between two systems" if comparison["baseline"] is None else f"to {comparison['baseline']}"
    text = f"Detects a difference {base} of {show(median(sizes))} {name} with 80 %{spread}."
    if not any(system["seeds"][1:] for system in comparison["systems"]):
        text += (
            " No system has a second seed, so that p and intervals contain only the variance between sentences: other "
            "seeds may differ more."
        )
    return text


def unequal_warning(comparison: Comparison) -> str:
    """Warn of systems whose seeds vary much more than those of the others; empty if there are none."""
    names = ", ".join(comparison["unequal"])
    return names and (
        f"The seeds of {names} vary more than twice as much as those of the others: the tests and intervals there rest "
        "on few seeds. Train more seeds before you trust a star."
    )


def notes_on_scores(comparison: Comparison) -> str:
    """Explain scores, intervals and tests."""
    samples, trials = comparison["bootstrap_samples"], comparison["randomisation_trials"]
    metric = METRICS[comparison["metric"]].heading
    higher, lower = (
        " and ".join(METRICS[name].heading for name in comparison["signatures"] if sign_of(name) == sign)
        for sign in (1, -1)
    )
    directions = f"{higher}: higher is better; " if higher else ""
    directions += f"{lower} and AER: lower is better" if lower else "AER: lower is better"
    reference = "the other system" if comparison["baseline"] is None else comparison["baseline"]
    groups = " Systems without a common letter differ." if comparison["baseline"] is None else ""
    chosen = ""
    if comparison["comparisons"] > len(comparison["differences"]):
        chosen = (
            f" {reference} is the baseline because it has the best score, and part of its lead is chance: p is "
            "corrected for that, intervals and raw p are not."
        )
    return (
        f"{directions}. {metric} of so many words: of the fifth of the test set with the longest sources. Scores are "
        "means over the seeds. ± "
        f"after {metric} and after a difference is half the width of the 95 % interval, not corrected for the number "
        "of comparisons; it contains the variance between sentences and, if a system has several seeds, that between "
        "seeds. After another mean, ± is the standard deviation over the seeds. "
        f"raw p: probability of a difference in {metric} from {reference} at least this large if both systems were "
        "equally good, by a t test with both variances; if no system has several seeds, the larger p of paired "
        f"bootstrap ({samples:,} samples) and paired approximate randomisation ({trials:,} trials). p: the same, "
        f"corrected for {comparison['comparisons']} comparisons by Holm's method; * below {SIGNIFICANT}.{groups}"
        f"{chosen} p, stratified: by stratified approximate randomisation, for these runs alone, not corrected. "
        "detects: the difference found with a probability of about 80 %. seeds needed: the seeds of every system with "
        "which a difference such as the observed one is found with about 80 %; inf: more seeds alone are not enough, "
        "the test set is too small. Single runs are tested against the baseline's run of the same seed between "
        "sentences alone, not corrected."
    )


def notes_on_costs(comparison: Comparison) -> str:
    """Explain times, and scores at an equal budget of training; empty if no run has recorded its training."""
    budget, machines = comparison["budget"], comparison["machines"]
    heading = METRICS[comparison["metric"]].heading
    if budget["updates"] is None:
        return ""
    text = (
        f"validation {heading}, {budget['updates']:,} updates: at the number of updates of the shortest run, read from "
        "the learning curves, linear between validations."
    )
    if budget["seconds"] is not None:
        text += (
            " ms/update: target tokens of a mean update, divided by the median speed of the logged windows. validation "
            f"{heading}, {human_duration(budget['seconds'])}: read from the same curves at the time in which the "
            "fastest system made all its updates. The time at a validation is the number of updates before it times "
            "ms/update, without validations. Schedules are not shortened for it: a slower system is "
            "in the middle of its own then."
        )
    if len(machines) > 1:
        text += (
            f" The runs are of {len(machines)} machines ({'; '.join(machines)}): times and speeds, and what is read at "
            "equal time, do not compare between them."
        )
    elif machines:
        text += f" Times and speeds are of {machines[0]}."
    return text
