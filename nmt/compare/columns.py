"""The columns of a comparison's tables, and the text of their cells, for the terminal, Markdown and the page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nmt.compare.compare import SIGNIFICANT, Comparison
from nmt.evaluate.metrics import METRICS
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
