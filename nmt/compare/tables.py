"""Tables of a comparison, for the terminal, in Markdown and as CSV, with what they mean."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nmt.compare.compare import Comparison
from nmt.compare.page import EXPLAINED, EXPLAINED_COLUMNS, NAMES, SIGNIFICANT, power, score_decimals
from nmt.config.errors import printable
from nmt.system import text_table as table
from nmt.system.text_table import Column, decimals

EXPLANATION = (
    "Kendall's tau: of attention weights and gradients (saliency), by source token. AER %: of the links that each of "
    "them and both together give. area: under the curve of an output token's probability while source tokens are "
    "masked in that order; the smaller against random, the better the explanation."
)
LEAST_P = 0.0001  # smaller ones are shown as below it
IN_FULL = (
    *(f"{name}_sd" for name in NAMES),
    "longest",
    "ter",
    "detectable",
    "seeds_needed",
    "p_stratified",
    "epoch_seconds",
    "tokens_per_second",
    "sentences_per_second",
)
Render = Callable[[Sequence[Mapping[str, object]], Sequence[Column]], str]


def text(comparisons: Sequence[Comparison], render: Render, in_full: bool = False) -> str:
    """The tables of systems with what their tests could show. in_full: all columns, runs and notes as well."""
    parts = []
    for comparison in comparisons:
        metric = comparison["metric"]
        title = f"{comparison['split']}: {comparison['sentences']} sentences, {comparison['signature']}"
        title += "" if metric == "bleu" else f"; ranked by {NAMES[metric]}"
        rows = _system_rows(comparison)
        columns = [column for column in _system_columns(rows, metric) if in_full or column.key not in IN_FULL]
        parts += [
            title,
            *map(printable, comparison["missing"]),
            render(rows, _with_values(columns, rows)),
            *([said] if (said := power(comparison)) else []),
        ]
        if _with_values(EXPLAINED, rows):
            parts += ["what attention explains:", render(rows, _with_values(EXPLAINED_COLUMNS, rows))]
            parts += [EXPLANATION] if in_full else []
        if in_full and comparison["baseline"] is None and comparison["differences"]:
            parts += [render(_difference_rows(comparison), _difference_columns(metric))]
        if in_full:
            parts += [render(comparison["runs"], _run_columns(comparison["runs"])), _notes(comparison)]
    return "\n\n".join(parts)


def csv_files(comparisons: Sequence[Comparison]) -> dict[str, str]:
    """comparison.csv with a line for each run, systems.csv for each system, differences.csv for each difference."""
    files = {"comparison.csv": "runs", "systems.csv": "systems", "differences.csv": "differences"}
    return {name: _csv(comparisons, key) for name, key in files.items()}


def _csv(comparisons: Sequence[Comparison], key: str) -> str:
    shared = ("split",) if key == "differences" else ("split", "baseline")
    lines = [
        {**{name: comparison[name] for name in shared}, **_plain(row)}
        for comparison in comparisons
        for row in comparison[key]
    ]
    file = io.StringIO()
    writer = csv.DictWriter(file, lines[0] if lines else shared, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without the data of charts; several seeds in one cell."""
    joined = {key: " ".join(map(str, value)) if key == "seeds" else value for key, value in row.items()}
    return {key: value for key, value in joined.items() if not isinstance(value, list | dict)}


def _notes(comparison: Comparison) -> str:
    samples, trials = comparison["bootstrap_samples"], comparison["randomisation_trials"]
    metric = NAMES[comparison["metric"]]
    reference = "the other system" if comparison["baseline"] is None else comparison["baseline"]
    groups = " Systems without a common letter differ." if comparison["baseline"] is None else ""
    return (
        f"± after {metric} and after a difference: half the width of the 95 % interval, which contains the variance "
        "between seeds and that between sentences. raw p: probability of a difference in "
        f"{metric} from {reference} at least this large if both systems were equally good, by a t test with both "
        f"variances; of one seed each the larger p of paired bootstrap ({samples} samples) and paired approximate "
        f"randomisation ({trials} trials). p: the same, corrected for {comparison['comparisons']} comparisons by "
        f"Holm's method; * below {SIGNIFICANT}.{groups} p, stratified: by stratified approximate randomisation, for "
        "these runs alone, not corrected. detects: the difference found with a probability of "
        "80 %. seeds needed: the seeds of each system with which a difference such as the observed one is found with "
        "80 %; inf: more seeds alone are not enough, the test set is too small. Single runs are tested against the "
        "baseline's run of the same seed between sentences alone, not corrected."
    )


def _system_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows of the table of systems, with the values that only it shows."""
    metric = comparison["metric"]
    show = score_decimals(metric)
    return [
        {
            **row,
            "longest": row["bleu_by_length"][-1]["bleu"],
            "count": len(row["seeds"]) or None,
            "scores": f"{show(row[metric])} ± {show(row[f'{metric}_ci'])}",
            "gain": _difference(row, metric),
        }
        for row in comparison["systems"]
    ]


def _difference(row: Mapping[str, Any], metric: str) -> str | None:
    """A difference with its interval; None for the baseline."""
    if row.get("difference") is None:
        return None
    show = score_decimals(metric)
    return f"{'' if row['difference'] < 0 else '+'}{show(row['difference'])} ± {show(row['difference_ci'])}"


def _system_columns(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Column]:
    from_words, to_words = rows[0]["bleu_by_length"][-1]["words"]
    others = {name: Column(name, heading, score_decimals(name)) for name, heading in NAMES.items() if name != metric}
    return [
        Column("rank", "#"),
        Column("name", "system"),
        Column("count", "seeds"),
        Column("scores", NAMES[metric]),
        Column(f"{metric}_sd", "sd of seeds", score_decimals(metric)),
        Column("letters", "groups"),
        *_test_columns(metric),
        *others.values(),
        Column("aer", "AER %", decimals(1)),
        Column("longest", f"BLEU, length {from_words}-{to_words}", decimals(2)),
        Column("parameters", "parameters", table.human_count),
        Column("epoch_seconds", "s/epoch", decimals(1)),
        Column("seconds", "training time", table.human_duration),
        Column("tokens_per_second", "tokens/s", "{:,.0f}".format),
        Column("sentences_per_second", "sentences/s", "{:,.0f}".format),
    ]


def _test_columns(metric: str) -> list[Column]:
    return [
        Column("gain", "difference"),
        Column("p", "p", lambda p: f"{_p_value(p)}{'*' if p < SIGNIFICANT else ''}"),
        Column("p_raw", "raw p", _p_value),
        Column("p_stratified", "p, stratified", _p_value),
        Column("detectable", "detects", score_decimals(metric)),
        Column("seeds_needed", "seeds needed", lambda count: "inf" if math.isinf(count) else str(count)),
    ]


def _difference_rows(comparison: Comparison) -> list[dict[str, Any]]:
    return [{**row, "gain": _difference(row, comparison["metric"])} for row in comparison["differences"]]


def _difference_columns(metric: str) -> list[Column]:
    return [Column("system", "system"), Column("baseline", "from"), *_test_columns(metric)]


def _run_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns = [Column("run", "run"), Column("system", "system"), Column("seed", "seed")]
    for metric, heading in NAMES.items():
        columns += [
            Column(metric, heading, score_decimals(metric)),
            Column(f"{metric}_ci", "±", score_decimals(metric)),
        ]
    columns += [
        Column("aer", "AER %", decimals(1)),
        Column("p_bootstrap", "p, bootstrap", _p_value),
        Column("p_randomisation", "p, randomisation", _p_value),
        *EXPLAINED,
    ]
    return _with_values(columns, rows)


def _with_values(columns: Iterable[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [column for column in columns if any(row.get(column.key) is not None for row in rows)]


def _p_value(p: float) -> str:
    return f"{p:.4f}" if p >= LEAST_P else f"<{LEAST_P}"
